// A head's vector as a KV pool keeps it, or as integers that multiply what a pool holds.
#pragma once

#include "dtype.h"
#include "int8_rows.h"

namespace llmbuild {

// What a pool's item holds: integers (codes) that are multiplied as pairs, or numbers.
template <class Item>
constexpr bool kIsInteger = false;
template <>
constexpr bool kIsInteger<int8_t> = true;
template <>
constexpr bool kIsInteger<int8_static> = true;
template <>
constexpr bool kIsInteger<int4x2> = true;

// element = minimum + scale * code; a scale for each token and head, a minimum as well.
template <class Item>
constexpr bool kHasScales = std::is_same_v<Item, int8_t> || std::is_same_v<Item, int4x2>;
template <class Item>
constexpr bool kHasMinima = std::is_same_v<Item, int4x2>;

// The largest magnitude of a code.
template <class Item>
constexpr int kLargestCode = kHasMinima<Item> ? 15 : 127;

// Elements in an item.
template <class Item>
constexpr int kElements = std::is_same_v<Item, int4x2> ? 2 : 1;

// Stores the lanes, rounded to the nearest integers (ties to even), as T, which must hold them.
template <class T, class V>
LLMBUILD_INLINE void store_rounded(T* to, V lanes) {
  if constexpr (IsPair<V>::value) {
    store_rounded(to, lanes.lo);
    store_rounded(to + sizeof(lanes.lo) / sizeof(float), lanes.hi);
  } else {
    typedef T Narrow __attribute__((vector_size(kNativeLanes * sizeof(T))));
    const Narrow narrow = __builtin_convertvector(round_to_int(lanes), Narrow);
    std::memcpy(to, &narrow, sizeof(narrow));
  }
}

// A row x[D] as integers up to LIMIT, padded with zeros to whole chunks, and the factor (returned)
// that they are multiplied with: integer = x * (LIMIT / largest magnitude), rounded to nearest,
// ties to even; factor = largest / LIMIT. The integers are 0 where LIMIT / largest isn't finite:
// for a row of zeros, and one with an infinity or NaN, which the factor passes on.
template <int D, int LIMIT, class T>
LLMBUILD_INLINE float round_row(const float* x, T* to) {
  constexpr int STRIDE = kChunks<D> * kLanes;
  alignas(64) float padded[STRIDE];
  for (int c = 0; c < kChunks<D>; ++c) store(padded + c * kLanes, load_chunk<D>(x, c));
  const float largest = largest_magnitude<STRIDE>(padded), inverse = LIMIT / largest;
  const bool finite = inverse <= std::numeric_limits<float>::max();
  const f32x16 factor = splat(finite ? inverse : 0.0f);
  for (int i = 0; i < STRIDE; i += kLanes) store_rounded(to + i, load(padded + i) * factor);
  return largest / LIMIT;
}

// A row x[D] as the nearest integers, ties to even, none beyond 127; a NaN becomes 0.
template <int D>
LLMBUILD_INLINE void round_plain_row(const float* x, int8_t* to) {
  for (int c = 0; c < kChunks<D>; ++c) {
    store_rounded(to + c * kLanes, within(load_chunk<D>(x, c), -127.0f, 127.0f));
  }
}

// What a row's codes mean: minimum + scale * code.
struct CodeRange {
  float scale, minimum;
};

// A row x[D] as codes from 0 to 15, of its range: the minimum, then scale = (largest - minimum) /
// 15 or 0 where that is negative, each rounded to bf16, then the codes that come nearest, ties to
// even: (x - minimum) * (1 / scale), or 0 where 1 / scale isn't finite. A row with an infinity or
// NaN, or whose range isn't finite in bf16, has the minimum NaN, and 0 for the rest.
template <int D>
LLMBUILD_INLINE CodeRange round_range_row(const float* x, uint8_t* to) {
  constexpr int STRIDE = kChunks<D> * kLanes;
  constexpr float LIMIT = std::numeric_limits<float>::max();
  alignas(64) float padded[STRIDE];
  std::memcpy(padded, x, D * sizeof(float));
  for (int i = D; i < STRIDE; ++i) padded[i] = x[0];
  f32x16 highest = load(padded), lowest = splat(0.0f) - highest;  // lowest: negated
  for (int i = kLanes; i < STRIDE; i += kLanes) {
    highest = maximum(highest, load(padded + i));
    lowest = maximum(lowest, splat(0.0f) - load(padded + i));
  }
  const float minimum = to_float(from_float<bf16>(-lane_maximum(lowest)));
  const float step = (lane_maximum(highest) - minimum) / 15;
  const float scale = to_float(from_float<bf16>(step < 0 ? 0.0f : step));
  const bool is_finite = largest_magnitude<STRIDE>(padded) <= LIMIT && -LIMIT <= minimum &&
                         minimum <= LIMIT && scale <= LIMIT;
  const bool has_steps = is_finite && 1 / scale <= LIMIT;
  const f32x16 inverse = splat(has_steps ? 1 / scale : 0.0f), start = splat(minimum);
  for (int i = 0; i < STRIDE; i += kLanes) {
    store_rounded(to + i, within((load(padded + i) - start) * inverse, 0.0f, 15.0f));
  }
  if (!is_finite) return {0.0f, std::numeric_limits<float>::quiet_NaN()};
  return {scale, minimum};
}

// A token's elements in one head as a pool of Items keeps them; padded to whole chunks.
template <class Item, int D>
struct KVRow {
  using Element = std::conditional_t<
      kHasMinima<Item>, uint8_t, std::conditional_t<kIsInteger<Item>, int8_t, Item>>;

  explicit KVRow(const float* x) {
    if constexpr (kHasMinima<Item>) {
      range = round_range_row<D>(x, elements);
    } else if constexpr (kHasScales<Item>) {
      range.scale = round_row<D, 127>(x, elements);
    } else if constexpr (kIsInteger<Item>) {
      round_plain_row<D>(x, elements);
    } else {
      for (int d = 0; d < D; ++d) elements[d] = from_float<Item>(x[d]);
    }
  }

  Element elements[kChunks<D> * kLanes];
  CodeRange range{1.0f, 0.0f};
};

}  // namespace llmbuild
