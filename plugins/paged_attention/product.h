// Register tiles of attention: queries times keys, weights times values.
#pragma once

#include "../common/pair_dot.h"

namespace llmbuild {

// Rows, for rows in groups of GROUP, and vectors of sixteen lanes in the largest tile.
template <int GROUP>
constexpr int kTileRows = kVectorRegisters < 32 ? 2 : GROUP % 3 == 0 ? 6 : 4;
constexpr int kTileVectors = kVectorRegisters >= 32 ? 4 : kVectorRegisters >= 8 ? 2 : 1;

// How a factor of the rows (a query's element, a key's weight) multiplies what a pool of Items holds.
// CELL: how many neighbouring products each lane sums at once.
template <class Item>
struct Product {
  using Factor = float;
  using Sums = f32x16;
  static constexpr int CELL = 1;

  static LLMBUILD_INLINE Sums zero() { return splat(0.0f); }
  static LLMBUILD_INLINE f32x16 items(const Item* from) { return load(from); }
  static LLMBUILD_INLINE f32x16 factor(const float* from) { return splat(*from); }
  static LLMBUILD_INLINE Sums add(f32x16 items, f32x16 factor, Sums sums) {
    return multiply_add(items, factor, sums);
  }
};

// Of codes: pairs of integers.
struct PairProduct {
  using Factor = int16_t;
  using Sums = i32x16;
  static constexpr int CELL = 2;

  static LLMBUILD_INLINE Sums zero() { return Sums{}; }
  template <class Item>
  static LLMBUILD_INLINE i32x16 items(const Item* from) {
    return load_pairs(from);
  }
  static LLMBUILD_INLINE i32x16 factor(const int16_t* from) { return splat_pair(from); }
  static LLMBUILD_INLINE Sums add(i32x16 items, i32x16 factor, Sums sums) {
    return add_pair_products(items, factor, sums);
  }
};
template <>
struct Product<int8_t> : PairProduct {};
template <>
struct Product<int8_static> : PairProduct {};
template <>
struct Product<int4x2> : PairProduct {};

// sums[r][v] += sum over s of factor s of row r * items s of vector v, in ascending order.
// Row r's factors begin at factors + r * row_stride; vector v's items at items[v], and one step on
// is `step_items` further. Asks the L2 for what lies as far from ahead[v], for a later tile: of
// the L1 it would wait in the same few places as the loads do.
template <class Item, int ROWS, int VECTORS, class Sums>
LLMBUILD_INLINE void multiply_tile(const Item* const (&items)[VECTORS],
                                   const void* const (&ahead)[VECTORS], int step_items,
                                   const typename Product<Item>::Factor* factors, int row_stride,
                                   int steps, Sums (&sums)[ROWS][VECTORS]) {
  using P = Product<Item>;
  for (int s = 0; s < steps; ++s) {
    decltype(P::items(items[0])) loaded[VECTORS];
    LLMBUILD_UNROLL for (int v = 0; v < VECTORS; ++v) {
      loaded[v] = P::items(items[v] + int64_t(s) * step_items);
      __builtin_prefetch(static_cast<const Item*>(ahead[v]) + int64_t(s) * step_items, 0, 2);
    }
    LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
      const auto factor = P::factor(factors + r * row_stride + s * P::CELL);
      LLMBUILD_UNROLL for (int v = 0; v < VECTORS; ++v) {
        sums[r][v] = P::add(loaded[v], factor, sums[r][v]);
      }
    }
  }
}

// Calls visit(constant<N>, begin) for runs that cover [begin, end), a multiple of UNIT: first of N,
// then of half as many, and so on.
template <int N, int UNIT, class Visit>
LLMBUILD_INLINE void for_each_run(int begin, int end, Visit visit) {
  for (; begin + N <= end; begin += N) visit(std::integral_constant<int, N>{}, begin);
  if constexpr (N > UNIT) for_each_run<N / 2, UNIT>(begin, end, visit);
}

}  // namespace llmbuild
