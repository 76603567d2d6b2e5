// Storage types of weights and KV pools, and their conversion from and to fp32.
#pragma once

#include "vec.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace llmbuild {

// The upper half of an fp32.
struct bf16 {
  uint16_t bits;
};

// IEEE binary16.
struct fp16 {
  uint16_t bits;
};

// A code from -127 to 127 of a KV pool without scales.
struct int8_static {
  int8_t code;
};

// Two codes from 0 to 15 of a KV pool, the first in the lower half.
struct int4x2 {
  uint8_t codes;
};

LLMBUILD_INLINE float to_float(float value) { return value; }

LLMBUILD_INLINE float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Rounds to the nearest T, ties to even; a NaN stays a (quiet) NaN.
template <class T>
LLMBUILD_INLINE T from_float(float value);

template <>
LLMBUILD_INLINE float from_float<float>(float value) {
  return value;
}

template <>
LLMBUILD_INLINE bf16 from_float<bf16>(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const uint32_t quiet_nan = bits >> 16 | 0x40;
  return {uint16_t((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded)};
}

// One hardware vector of bf16 as fp32. Intrinsics, because g++ 12 compiles the portable conversion
// (of the last branch) to several shuffles instead of one extending load.
template <class V>
LLMBUILD_INLINE V widen(const bf16* from) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) {
    // Zero-masked with every lane on: the plain form draws false warnings from g++ 12.
    const __m256i narrow = _mm256_loadu_si256((const __m256i*)from);
    return (V)_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, narrow), 16);
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) {
    const __m128i narrow = _mm_loadu_si128((const __m128i*)from);
    return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16);
  }
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(V) == 16) {
    return (V)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)from));
  }
#endif
  constexpr int LANES = sizeof(V) / sizeof(float);
  float lanes[LANES];
  for (int i = 0; i < LANES; ++i) lanes[i] = to_float(from[i]);
  return load<V>(lanes);
}

// One hardware vector of fp16 as fp32.
template <class V>
LLMBUILD_INLINE V widen(const fp16* from) {
#if defined(__AVX512F__)
  return (V)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  // Exponent and fraction go to the place of fp32's, whose exponents count from 112 lower: a
  // product corrects that, for subnormals too. Infinities and NaN (quiet) are put together.
  typedef uint16_t Narrow __attribute__((vector_size(2 * kNativeLanes)));
  Narrow narrow;
  std::memcpy(&narrow, from, sizeof(narrow));
  const NativeI32 bits = __builtin_convertvector(narrow, NativeI32);
  const NativeI32 magnitude = (bits & 0x7fff) << 13, largest = NativeI32{} + (0x7c00 << 13);
  const NativeI32 special =
      ((magnitude >= largest) & 0x7f800000) | ((magnitude > largest) & 0x400000);
  const NativeI32 number = (NativeI32)((V)magnitude * splat<V>(0x1p112f));
  return (V)(number | special | (bits & 0x8000) << 16);
#endif
}

LLMBUILD_INLINE float to_float(fp16 value) {
  const fp16 lanes[kNativeLanes] = {value};
  return widen<NativeF32>(lanes)[0];
}

// Unaligned load of as many T, bf16 or fp16, as V has lanes.
template <class V = f32x16, class T, class = decltype(T::bits)>
LLMBUILD_INLINE V load(const T* from) {
  if constexpr (IsPair<V>::value) {
    using Half = decltype(V::lo);
    return {load<Half>(from), load<Half>(from + sizeof(Half) / sizeof(float))};
  } else {
    return widen<V>(from);
  }
}

// The first `count` of 16 values, 0 <= count <= 16; the other lanes are zero and not read.
template <class T>
LLMBUILD_INLINE f32x16 load_first(const T* from, int count) {
  float lanes[kLanes] = {};
  for (int i = 0; i < count; ++i) lanes[i] = to_float(from[i]);
  return load(lanes);
}

// Chunks of 16 lanes that a row of N values is cut into; the last may be short.
template <int N>
constexpr int kChunks = (N + kLanes - 1) / kLanes;

// Chunk `i` of a row of N values; lanes past the row's end are zero (load) or left alone (store).
template <int N, class T>
LLMBUILD_INLINE f32x16 load_chunk(const T* row, int i) {
  if (N % kLanes != 0 && i == N / kLanes) return load_first(row + i * kLanes, N % kLanes);
  return load(row + i * kLanes);
}
template <int N>
LLMBUILD_INLINE void store_chunk(float* row, int i, f32x16 value) {
  if (N % kLanes != 0 && i == N / kLanes) {
    store_first(row + i * kLanes, value, N % kLanes);
  } else {
    store(row + i * kLanes, value);
  }
}

}  // namespace llmbuild
