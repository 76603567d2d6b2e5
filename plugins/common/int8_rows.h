// Activations as rows of int8 with one fp32 scale for every A neighbouring columns.
#pragma once

#include "dot.h"
#include "dtype.h"
#include "vec_math.h"

namespace llmbuild {

// Layout of a row of K columns: x = scale * code. One row serves weights of every grid, since it
// also holds the sums that a weight's zero point or minimum is multiplied with.
template <int K, int A>
struct Int8Row {
  static constexpr int SUM_COLUMNS = 32;  // a sum is over so many
  static_assert(A % SUM_COLUMNS == 0 && K % A == 0, "A must be a multiple of 32 that divides K");
  static constexpr int GROUPS = K / A;
  static constexpr int SUMS = K / SUM_COLUMNS;

  // int8 codes[K], from -127 to 127
  // float scales[GROUPS]
  // int32 negated_sums[SUMS]: minus the sum of the codes
  // float scaled_sums[SUMS]: the sum of the codes times their scale
  static constexpr int SCALES = K;
  static constexpr int NEGATED_SUMS = SCALES + 4 * GROUPS;
  static constexpr int SCALED_SUMS = NEGATED_SUMS + 4 * SUMS;
  static constexpr int BYTES = (SCALED_SUMS + 4 * SUMS + 63) / 64 * 64;

  static LLMBUILD_INLINE const float* scales(const uint8_t* row) {
    return reinterpret_cast<const float*>(row + SCALES);
  }
  static LLMBUILD_INLINE const int32_t* negated_sums(const uint8_t* row) {
    return reinterpret_cast<const int32_t*>(row + NEGATED_SUMS);
  }
  static LLMBUILD_INLINE const float* scaled_sums(const uint8_t* row) {
    return reinterpret_cast<const float*>(row + SCALED_SUMS);
  }
};

// The nearest integers, ties to even. Instructions, so that no compiler fuses the product that is
// rounded with an addition that rounds.
LLMBUILD_INLINE NativeI32 round_to_int(NativeF32 x) {
#if defined(__AVX512F__)
  return (NativeI32)_mm512_maskz_cvtps_epi32(0xffff, (__m512)x);  // the plain form draws warnings
#elif defined(__AVX__)
  return (NativeI32)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (NativeI32)_mm_cvtps_epi32((__m128)x);
#else
  NativeI32 rounded;
  for (int i = 0; i < kNativeLanes; ++i) rounded[i] = int32_t(__builtin_rintf(x[i]));
  return rounded;
#endif
}

// Of lanes that are no negative numbers, the larger; a NaN is above all numbers.
template <class V>
LLMBUILD_INLINE V larger(V a, V b) {
  typedef int32_t Bits __attribute__((vector_size(sizeof(V))));
  return (V)((Bits)a > (Bits)b ? (Bits)a : (Bits)b);
}

template <class V>
LLMBUILD_INLINE float largest_lane(V v) {
  if constexpr (sizeof(V) == sizeof(f32x4)) {
    const f32x4 pairs = larger(v, f32x4(__builtin_shufflevector(v, v, 2, 3, 0, 1)));
    return larger(pairs, f32x4(__builtin_shufflevector(pairs, pairs, 1, 0, 3, 2)))[0];
  } else {
    const auto pair = halves(v);
    return largest_lane(larger(pair.lo, pair.hi));
  }
}

// The largest magnitude of COUNT values (a multiple of 16); NaN if one of them is.
template <int COUNT>
LLMBUILD_INLINE float largest_magnitude(const float* x) {
  NativeF32 largest{};
  for (int i = 0; i < COUNT; i += kNativeLanes) {
    largest = larger(largest, absolute(load<NativeF32>(x + i)));
  }
  return largest_lane(largest);
}

// Lanes of x within [low, high]; a NaN stays.
template <class V>
LLMBUILD_INLINE V within(V x, float low, float high) {
  if constexpr (IsPair<V>::value) {
    return {within(x.lo, low, high), within(x.hi, low, high)};
  } else {
    const V above = x < low ? splat<V>(low) : x;
    return above > high ? splat<V>(high) : above;
  }
}

// The low bytes of 32 lanes, stored, and the sum of these as int8. Instructions, where compilers
// would take lanes one by one.
LLMBUILD_INLINE int32_t store_bytes(uint8_t* to, const NativeI32 (&lanes)[32 / kNativeLanes]) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m128i low = _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)lanes[0]);
  const __m128i high = _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)lanes[1]);
  const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
#else
  const auto words = [&](int i) __attribute__((always_inline)) {
    return _mm256_packs_epi32((__m256i)(lanes[i] & 0xff), (__m256i)(lanes[i + 1] & 0xff));
  };
  const __m256i mixed = _mm256_packus_epi16(words(0), words(2));  // by halves of each vector
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(mixed, order);
#endif
  _mm256_storeu_si256((__m256i*)to, bytes);
  // Sums of eight differences to zero, of bytes that are moved to begin there.
  const __m256i moved = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
  const __m256i four = _mm256_sad_epu8(moved, _mm256_setzero_si256());
  const __m128i two =
      _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 2) - 32 * 128;
#else
  NativeI32 sums{};
  for (int i = 0; i < 32 / kNativeLanes; ++i) {
    sums += lanes[i] << 24 >> 24;
    const NativeI32 low = lanes[i] & 0xff;
#if defined(__SSE2__)
    const __m128i words = _mm_packs_epi32((__m128i)low, (__m128i)low);
    const __m128i bytes = _mm_packus_epi16(words, words);
#else
    typedef int8_t Bytes __attribute__((vector_size(kNativeLanes)));
    const Bytes bytes = __builtin_convertvector(low, Bytes);
#endif
    std::memcpy(to + i * kNativeLanes, &bytes, kNativeLanes);
  }
  return int32_t(lane_sum(to_float(sums)));  // exact: below 2^24
#endif
}

// Writes group `group` of a row from the A values at x: code = x * inverse rounded half to even,
// with CLAMP none beyond 127.
template <int K, int A, bool CLAMP>
LLMBUILD_INLINE void write_group(const float* x, int group, float scale, float inverse,
                                 uint8_t* row) {
  using Row = Int8Row<K, A>;
  const NativeF32 factor = splat<NativeF32>(inverse);
  std::memcpy(row + Row::SCALES + 4 * group, &scale, sizeof(scale));
  for (int i = 0; i < A; i += Row::SUM_COLUMNS) {
    NativeI32 codes[Row::SUM_COLUMNS / kNativeLanes];
    LLMBUILD_UNROLL for (int j = 0; j < Row::SUM_COLUMNS / kNativeLanes; ++j) {
      NativeF32 scaled = load<NativeF32>(x + i + j * kNativeLanes) * factor;
      if constexpr (CLAMP) scaled = within(scaled, -127.0f, 127.0f);
      codes[j] = round_to_int(scaled);
    }
    const int32_t sum = store_bytes(row + group * A + i, codes);
    const int32_t negated_sum = -sum;
    const float scaled_sum = scale * float(sum);
    const int at = 4 * ((group * A + i) / Row::SUM_COLUMNS);
    std::memcpy(row + Row::NEGATED_SUMS + at, &negated_sum, sizeof(negated_sum));
    std::memcpy(row + Row::SCALED_SUMS + at, &scaled_sum, sizeof(scaled_sum));
  }
}

// Writes group `group` of a row from the A values at x: code = x * (127 / largest) rounded half to
// even, scale = largest / 127. Codes are 0 where 127 / largest isn't finite: a group of zeros (or
// of less than 4e-37), and one with an infinity or NaN, which the scale passes on.
// STATIC: scale = scales[group], whose reciprocal must be finite, and code = x * (1 / scale) rounded
// half to even, none beyond 127: infinities are 127 scales. A NaN is passed on by the scale.
template <int K, int A, bool STATIC = false>
LLMBUILD_INLINE void quantise_group(const float* x, int group, uint8_t* row,
                                    const float* scales = nullptr) {
  const float largest = largest_magnitude<A>(x);
  if constexpr (STATIC) {
    const float scale = scales[group];
    const bool is_nan = largest != largest;
    write_group<K, A, true>(x, group, is_nan ? largest : scale, 1.0f / scale, row);
  } else {
    const float inverse = 127.0f / largest;
    const bool finite = inverse <= std::numeric_limits<float>::max();
    write_group<K, A, false>(x, group, largest / 127.0f, finite ? inverse : 0.0f, row);
  }
}

// Writes a whole row from the K values at x. Bytes past its sums are left alone. STATIC: with
// scales[K / A] that are the same for every row.
template <int K, int A, bool STATIC = false>
LLMBUILD_INLINE void quantise_row(const float* x, uint8_t* row, const float* scales = nullptr) {
  for (int group = 0; group < K / A; ++group) {
    quantise_group<K, A, STATIC>(x + group * A, group, row, scales);
  }
}

}  // namespace llmbuild
