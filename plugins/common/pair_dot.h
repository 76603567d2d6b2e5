// Integer dot products over pairs: int32 lanes, to each of which a product of two int16 pairs is
// added. Codes of 8 or 4 bits, widened, times values of 15 bits: exact, and twice the rate of fp32.
#pragma once

#include "dtype.h"
#include "vec_math.h"

namespace llmbuild {

// int32 lanes in the shape of f32x16.
template <class V>
struct IntegersOf {
  using type = Pair<typename IntegersOf<decltype(V::lo)>::type>;
};
template <>
struct IntegersOf<NativeF32> {
  using type = NativeI32;
};
using i32x16 = IntegersOf<f32x16>::type;

// As many pairs of int8 as V has lanes, each lane the pair as int16, the first in the lower half.
template <class V = i32x16>
LLMBUILD_INLINE V load_pairs(const int8_t* from) {
  if constexpr (IsPair<V>::value) {
    using Half = decltype(V::lo);
    return {load_pairs<Half>(from), load_pairs<Half>(from + sizeof(Half) / 2)};
  } else {
#if defined(__AVX512BW__)
    return (V)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (V)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
#elif defined(__SSE2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)from);
    return (V)_mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
#else
    int16_t items[sizeof(V) / 2];
    for (size_t i = 0; i < sizeof(V) / 2; ++i) items[i] = from[i];
    V pairs;
    std::memcpy(&pairs, items, sizeof(V));
    return pairs;
#endif
  }
}

template <class V = i32x16>
LLMBUILD_INLINE V load_pairs(const int8_static* from) {
  return load_pairs<V>(&from->code);
}

// As many bytes of two codes as V has lanes, each lane the two as int16.
template <class V = i32x16>
LLMBUILD_INLINE V load_pairs(const int4x2* from) {
  if constexpr (IsPair<V>::value) {
    using Half = decltype(V::lo);
    return {load_pairs<Half>(from), load_pairs<Half>(from + sizeof(Half) / sizeof(int32_t))};
  } else {
#if defined(__AVX512F__)
    // Zero-masked with every lane on: the plain form draws false warnings from g++ 12.
    const V bytes = (V)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    const V bytes = (V)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    V bytes;
    for (size_t i = 0; i < sizeof(V) / sizeof(int32_t); ++i) bytes[i] = from[i].codes;
#endif
    return (bytes | bytes << 12) & 0x000f000f;
  }
}

// Every lane = the pair at `from`.
template <class V = i32x16>
LLMBUILD_INLINE V splat_pair(const int16_t* from) {
  if constexpr (IsPair<V>::value) {
    const auto half = splat_pair<decltype(V::lo)>(from);
    return {half, half};
  } else {
    int32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return V{} + pair;
  }
}

// sums + a.first * b.first + a.second * b.second in every lane, without a carry into another.
template <class V>
LLMBUILD_INLINE V add_pair_products(V a, V b, V sums) {
  if constexpr (IsPair<V>::value) {
    return {add_pair_products(a.lo, b.lo, sums.lo), add_pair_products(a.hi, b.hi, sums.hi)};
  } else {
#if defined(__AVX512VNNI__)
    return (V)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (V)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#elif defined(__AVX512BW__)
    return sums + (V)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return sums + (V)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return sums + (V)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
  }
}

LLMBUILD_INLINE NativeF32 to_float(NativeI32 lanes) {
  return __builtin_convertvector(lanes, NativeF32);
}
template <class V>
LLMBUILD_INLINE auto to_float(Pair<V> lanes) -> Pair<decltype(to_float(lanes.lo))> {
  return {to_float(lanes.lo), to_float(lanes.hi)};
}

}  // namespace llmbuild
