// Integer dots of unsigned codes with signed ones, exact at every ISA level: sixteen at once, four
// columns a step. All that depends on the instruction set stands here.
#pragma once

#include "pair_dot.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace llmbuild {

// f(a, b, ...) of each of the native vectors that the arguments are made of.
template <class F, class V, class... Rest>
LLMBUILD_INLINE auto each_native(F f, V first, Rest... rest) {
  if constexpr (IsPair<V>::value) {
    auto lo = each_native(f, first.lo, rest.lo...);
    return Pair<decltype(lo)>{lo, each_native(f, first.hi, rest.hi...)};
  } else {
    return f(first, rest...);
  }
}

// One native vector in all places.
template <class V = i32x16>
LLMBUILD_INLINE V repeat(NativeI32 value) {
  if constexpr (IsPair<V>::value) {
    const auto half = repeat<decltype(V::lo)>(value);
    return {half, half};
  } else {
    return value;
  }
}

// The four bytes at `from` in every lane.
LLMBUILD_INLINE NativeI32 splat_word(const void* from) {
  int32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word - NativeI32{};
}

// Unaligned load of 64 bytes.
template <class V = i32x16>
LLMBUILD_INLINE V load_words(const uint8_t* from) {
  if constexpr (IsPair<V>::value) {
    using Half = decltype(V::lo);
    return {load_words<Half>(from), load_words<Half>(from + sizeof(Half))};
  } else {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
  }
}

// Bits [SHIFT, SHIFT + BITS) of every byte, as bytes; SHIFT + BITS <= 8.
template <int SHIFT, int BITS>
LLMBUILD_INLINE i32x16 byte_field(i32x16 words) {
  constexpr int32_t MASK = ((1 << BITS) - 1) * 0x01010101;
  return each_native(
      [](NativeI32 v) __attribute__((always_inline)) { return v >> SHIFT & MASK; }, words);
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define LLMBUILD_VNNI 1

// sum + the dot of four unsigned with four signed bytes, in every lane.
LLMBUILD_INLINE NativeI32 dot_bytes(NativeI32 sum, NativeI32 codes, NativeI32 x) {
#if defined(__AVX512VNNI__)
  return (NativeI32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#else
  return (NativeI32)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#endif
}

#else
#define LLMBUILD_VNNI 0

// Products of unsigned with signed bytes, neighbours added in int16. Exact for codes below 16.
LLMBUILD_INLINE NativeI32 pair_products(NativeI32 codes, NativeI32 x) {
#if defined(__AVX512BW__)
  return (NativeI32)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
#elif defined(__AVX2__)
  return (NativeI32)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#else
  typedef int16_t Halves __attribute__((vector_size(sizeof(NativeI32))));
  const Halves even = (Halves)x << 8 >> 8, odd = (Halves)x >> 8;
  return (NativeI32)(((Halves)codes & 0xff) * even + ((Halves)codes >> 8) * odd);
#endif
}

LLMBUILD_INLINE NativeI32 add_int16(NativeI32 a, NativeI32 b) {
  typedef int16_t Halves __attribute__((vector_size(sizeof(NativeI32))));
  NativeI32 sum = (NativeI32)((Halves)a + (Halves)b);
#if defined(__x86_64__)
  asm("" : "+v"(sum));  // or g++ forms all products first, and adds up what it has spilled
#endif
  return sum;
}

// FACTOR times the sum of the two int16 of every lane.
template <int FACTOR>
LLMBUILD_INLINE NativeI32 pair_sums(NativeI32 words) {
#if defined(__AVX512BW__)
  return (NativeI32)_mm512_madd_epi16((__m512i)words, _mm512_set1_epi16(FACTOR));
#elif defined(__AVX2__)
  return (NativeI32)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi16(FACTOR));
#else
  return ((words << 16 >> 16) + (words >> 16)) * FACTOR;
#endif
}

#endif

// Sixteen dots in the making. Codes have BITS bits, 4 or 8; the other operand is in [-127, 127].
// Made for blocks of 32 columns: eight times add(), then end_block().
template <int BITS>
struct Dots {
#if LLMBUILD_VNNI
  using Codes = i32x16;

  i32x16 total;

  static LLMBUILD_INLINE Dots from(i32x16 start) { return {start}; }

  // The codes of four columns, one a byte, as add() takes them.
  static LLMBUILD_INLINE Codes codes(i32x16 bytes) { return bytes; }

  LLMBUILD_INLINE void add(Codes codes, NativeI32 x) {
    total = each_native(
        [&](NativeI32 sum, NativeI32 code) __attribute__((always_inline)) {
          return dot_bytes(sum, code, x);
        },
        total, codes);
  }

  LLMBUILD_INLINE void end_block() {}
#else
  // A code of 8 bits is taken as two of 4, so that the int16 sums of eight steps can't overflow:
  // 8 * 2 * 15 * 127 < 2^15.
  static constexpr int NIBBLES = BITS / 4;
  struct Codes {
    i32x16 nibbles[NIBBLES];
  };

  i32x16 total, block[NIBBLES];

  static LLMBUILD_INLINE Dots from(i32x16 start) {
    Dots dots;
    dots.total = start;
    for (i32x16& sums : dots.block) sums = repeat(NativeI32{});
    return dots;
  }

  static LLMBUILD_INLINE Codes codes(i32x16 bytes) {
    if constexpr (BITS == 4) {
      return {{bytes}};
    } else {
      return {{byte_field<0, 4>(bytes), byte_field<4, 4>(bytes)}};
    }
  }

  LLMBUILD_INLINE void add(const Codes& codes, NativeI32 x) {
    LLMBUILD_UNROLL for (int i = 0; i < NIBBLES; ++i) {
      block[i] = each_native(
          [&](NativeI32 sum, NativeI32 code) __attribute__((always_inline)) {
            return add_int16(sum, pair_products(code, x));
          },
          block[i], codes.nibbles[i]);
    }
  }

  LLMBUILD_INLINE void end_block() {
    LLMBUILD_UNROLL for (int i = 0; i < NIBBLES; ++i) {
      total = each_native(
          [&](NativeI32 sum, NativeI32 part) __attribute__((always_inline)) {
            return sum + (i == 0 ? pair_sums<1>(part) : pair_sums<16>(part));
          },
          total, block[i]);
      block[i] = repeat(NativeI32{});
    }
  }
#endif
};

}  // namespace llmbuild
