// y = x W^T (+ bias) with quantised weights: integer dots with int8 activations, or fp32 ones.
#pragma once

#include <algorithm>

#include "../common/grid.h"
#include "../common/int8_rows.h"
#include "../common/team.h"

namespace llmbuild {

// Register tiles: up to DIRECT_ROWS rows, which wait for memory, are multiplied a column tile (16
// outputs) at a time; more rows, which wait for multiplications, ROWS by TILES at a time.
struct Int8Tile {
#if defined(__AVX512F__)
  static constexpr int DIRECT_ROWS = 8, ROWS = 4, TILES = 3;
#else
  static constexpr int DIRECT_ROWS = 4, ROWS = 4, TILES = 1;
#endif
};

// One linear of fixed shape. Invariant: an output is, over segments of columns in ascending order,
// a chain of fp32 multiply-adds of exact integer dots, then the bias; tile shape, row count and
// thread count don't enter.
template <class GRID, int N, int K, int A, int LDY>
struct Int8Linear {
  using Row = Int8Row<K, A>;
  static constexpr int BLOCK = GRID::BLOCK, GROUP = GRID::GROUP;
  static constexpr int SEGMENT = std::min(GROUP, A);  // columns with one scale on either side
  static constexpr int64_t TILE_BYTES = GRID::template TILE_BYTES<K>;
  static_assert(K % GROUP == 0, "the group of a weight must divide K");
  static_assert(std::max(GROUP, A) % SEGMENT == 0, "groups of weight and activation must nest");
  static_assert(int64_t(SEGMENT) * 255 * 127 < int64_t(1) << 31, "a dot must fit into int32");
  // Tiles that multiply a byte of weights at least eight times keep the multipliers busy if it lies
  // in L1 by then; those of fewer wait for memory, and L2 is as good and lets more be on its way.
  template <int ROWS>
  static constexpr bool BUSY = ROWS >= GRID::BITS;
  // How far before their use the weights of a single stream are asked for.
  template <int ROWS>
  static constexpr int64_t AHEAD_BYTES = BUSY<ROWS> ? 2048 : 1024;
  // Several tiles of 8 bits are more than memory gives while they are gone through once. So each
  // time, with other rows, a part of the next ones is asked for: so much a block of columns.
  template <int TILES>
  static constexpr int64_t PART_BYTES = GRID::BITS == 8 && TILES > 1 ? 256 : 0;
  // A weight with one scale a row takes it at the end.
  static constexpr bool SCALE_LAST = GROUP == K && !GRID::ASYMMETRIC;

  const uint8_t* x;
  const uint8_t* weight;
  const float* bias;
  float* y;

  template <int ROWS, int TILES>
  struct Sums {
    f32x16 of[ROWS][TILES];
  };

  // Outputs [ROWS, 16 * TILES] from `row` and `column_tile` on. Asks for the weights that lie
  // `ahead` bytes after those that it reads, or for a part of them that begins there.
  template <int ROWS, int TILES>
  __attribute__((noinline)) void tile(int row, int column_tile, int64_t ahead) const {
    const uint8_t* xr = x + int64_t(row) * Row::BYTES;
    const uint8_t* group = weight + column_tile * TILE_BYTES;
    Sums<ROWS, TILES> sums;
    LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
      LLMBUILD_UNROLL for (int t = 0; t < TILES; ++t) sums.of[r][t] = splat(0.0f);
    }
    const uint8_t* part = group + ahead;
    for (int k = 0; k < K; k += GROUP, group += GRID::GROUP_BYTES) {
      for (int begin = 0; begin < GROUP; begin += SEGMENT) {
        segment<ROWS, TILES>(xr, group, k, begin, ahead, part, sums);
        part += SEGMENT / BLOCK * PART_BYTES<TILES>;
      }
    }
    LLMBUILD_UNROLL for (int t = 0; t < TILES; ++t) {
      const uint8_t* last = group - GRID::GROUP_BYTES + t * TILE_BYTES;
      const f32x16 b = bias == nullptr ? splat(0.0f) : load_chunk<N>(bias, column_tile + t);
      LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
        const f32x16 sum = sums.of[r][t];
        const f32x16 scaled = SCALE_LAST ? multiply_add(sum, load(GRID::scales(last)), b) : sum + b;
        store_chunk<N>(y + int64_t(row + r) * LDY, column_tile + t, scaled);
      }
    }
  }

  // Adds columns [begin, begin + SEGMENT) of the group at `group`, which begins at column k.
  template <int ROWS, int TILES>
  static LLMBUILD_INLINE void segment(const uint8_t* xr, const uint8_t* group, int k, int begin,
                                      int64_t ahead, const uint8_t* part,
                                      Sums<ROWS, TILES>& sums) {
    Dots<GRID::BITS> dots[ROWS][TILES];
    LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
      const i32x16 start = repeat(zero_point(xr + r * Row::BYTES, k + begin));
      LLMBUILD_UNROLL for (int t = 0; t < TILES; ++t) {
        dots[r][t] = Dots<GRID::BITS>::from(start);
      }
    }
    for (int i = begin; i < begin + SEGMENT; i += BLOCK) {
      block<ROWS, TILES>(xr + k + i, group + i / GRID::VECTOR_COLUMNS * 64, ahead,
                         part + (i - begin) / BLOCK * PART_BYTES<TILES>, dots);
    }
    LLMBUILD_UNROLL for (int t = 0; t < TILES; ++t) {
      const f32x16 scale = load(GRID::scales(group + t * TILE_BYTES));
      LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
        const f32x16 a = splat(Row::scales(xr + r * Row::BYTES)[(k + begin) / A]);
        const f32x16 dot = to_float(dots[r][t].total);
        f32x16& sum = sums.of[r][t];
        sum = SCALE_LAST ? multiply_add(dot, a, sum) : multiply_add(dot * a, scale, sum);
      }
      if constexpr (GRID::ASYMMETRIC) {
        const f32x16 minimum = GRID::minima(group + t * TILE_BYTES);
        LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
          const float* scaled_sums = Row::scaled_sums(xr + r * Row::BYTES);
          for (int i = (k + begin) / BLOCK; i < (k + begin + SEGMENT) / BLOCK; ++i) {
            sums.of[r][t] = multiply_add(minimum, splat(scaled_sums[i]), sums.of[r][t]);
          }
        }
      }
    }
  }

  // What a symmetric weight's dots over a segment start from: codes stand for code - ZERO.
  static LLMBUILD_INLINE NativeI32 zero_point(const uint8_t* row, int k) {
    NativeI32 sum{};
    if constexpr (!GRID::ASYMMETRIC) {
      const int32_t* negated_sums = Row::negated_sums(row) + k / BLOCK;
      sum = splat_word(negated_sums);
      for (int i = 1; i < SEGMENT / BLOCK; ++i) sum += splat_word(negated_sums + i);
      sum *= GRID::ZERO;
    }
    return sum;
  }

  // Adds 32 columns: x at their codes, `words` at those of the weight.
  template <int ROWS, int TILES>
  static LLMBUILD_INLINE void block(const uint8_t* xr, const uint8_t* words, int64_t ahead,
                                    const uint8_t* part, Dots<GRID::BITS> (&dots)[ROWS][TILES]) {
    using Codes = typename Dots<GRID::BITS>::Codes;
    LLMBUILD_UNROLL for (int i = 0; i < PART_BYTES<TILES>; i += 64) {
      __builtin_prefetch(part + i, 0, 3);
    }
    constexpr int STEPS = GRID::VECTOR_COLUMNS / 4;  // of four columns, in one vector of codes
    LLMBUILD_UNROLL for (int v = 0; v < BLOCK / GRID::VECTOR_COLUMNS; ++v) {
      Codes codes[STEPS][TILES];
      LLMBUILD_UNROLL for (int t = 0; t < TILES; ++t) {
        const uint8_t* vector = words + t * TILE_BYTES + v * 64;
        const i32x16 bytes = load_words(vector);
        if constexpr (PART_BYTES<TILES> == 0) {
          __builtin_prefetch(vector + ahead, 0, BUSY<ROWS> ? 3 : 2);
        }
        if constexpr (GRID::BITS == 8) {
          codes[0][t] = Dots<8>::codes(bytes);
        } else {
          codes[0][t] = Dots<4>::codes(byte_field<0, 4>(bytes));
          codes[1][t] = Dots<4>::codes(byte_field<4, 4>(bytes));
        }
      }
      LLMBUILD_UNROLL for (int s = 0; s < STEPS; ++s) {
        LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
          const NativeI32 four = splat_word(xr + r * Row::BYTES + v * GRID::VECTOR_COLUMNS + 4 * s);
          LLMBUILD_UNROLL for (int t = 0; t < TILES; ++t) dots[r][t].add(codes[s][t], four);
        }
      }
    }
    LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
      LLMBUILD_UNROLL for (int t = 0; t < TILES; ++t) dots[r][t].end_block();
    }
  }

  // Rows [row, rows) of one column tile, ROWS at a time, then the rest in halves of that.
  template <int ROWS>
  void direct_rows(int row, int rows, int column_tile) const {
    for (; row + ROWS <= rows; row += ROWS) tile<ROWS, 1>(row, column_tile, AHEAD_BYTES<ROWS>);
    if constexpr (ROWS > 1) direct_rows<ROWS / 2>(row, rows, column_tile);
  }

  // All rows of some column tiles.
  void run(Range column_tiles, int rows) const {
    constexpr int ROWS = Int8Tile::ROWS, TILES = Int8Tile::TILES;
    int first = column_tiles.begin;
    static_assert(ROWS > 1);
    if (rows > Int8Tile::DIRECT_ROWS) {
      for (; first + TILES <= column_tiles.end; first += TILES) {
        int row = 0;
        for (; row + ROWS <= rows; row += ROWS) {
          const int64_t begin = PART_BYTES<TILES> > 0 ? TILES * TILE_BYTES * row / rows : 0;
          tile<ROWS, TILES>(row, first, TILES * TILE_BYTES + begin);
        }
        for (int t = 0; t < TILES; ++t) direct_rows<ROWS / 2>(row, rows, first + t);
      }
    }
    for (; first < column_tiles.end; ++first) {
      direct_rows<Int8Tile::DIRECT_ROWS>(0, rows, first);
    }
  }
};

// y[r, n] = sum over k of x[r, k] w[n, k], + bias[n] unless bias is null. x: rows of Int8Row<K, A>,
// one after the other. weight: packed on GRID. y: [rows, N] with row stride LDY. Each weight is
// read by one worker.
template <class GRID, int N, int K, int A, int LDY>
void int8_linear(const Worker& worker, const uint8_t* x, const uint8_t* weight, const float* bias,
                 float* y, int rows) {
  const Int8Linear<GRID, N, K, A, LDY> shape{x, weight, bias, y};
  shape.run(split(kChunks<N>, worker), rows);
}

// The same with fp32 activations. Invariant: an output has the bits that linear() gives on the
// dequantised weight.
template <class GRID, int N, int K, int LDX, int LDY>
struct DequantisedLinear {
  static constexpr int BLOCK = GRID::BLOCK;
  static constexpr int ROWS = kVectorRegisters >= 32 ? 8 : kVectorRegisters >= 8 ? 4 : 2;
  static constexpr int DEPTH = std::min(K, 256);  // columns that are dequantised at a time
  static_assert(K % GRID::GROUP == 0, "the group of a weight must divide K");

  const float* x;
  const uint8_t* weight;
  const float* bias;
  float* y;

  // Adds columns [begin, end), dequantised into `values`, to COUNT rows.
  template <int COUNT>
  __attribute__((noinline)) void add(const float* values, int begin, int end, int row,
                                     int column_tile) const {
    const float* xr = x + int64_t(row) * LDX;
    float* yr = y + int64_t(row) * LDY;
    f32x16 sums[COUNT];
    LLMBUILD_UNROLL for (int r = 0; r < COUNT; ++r) {
      sums[r] = begin == 0 ? splat(0.0f) : load_chunk<N>(yr + r * LDY, column_tile);
    }
    for (int k = begin; k < end; ++k, values += kLanes) {
      const f32x16 column = load(values);
      LLMBUILD_UNROLL for (int r = 0; r < COUNT; ++r) {
        sums[r] = multiply_add(column, splat(xr[r * LDX + k]), sums[r]);
      }
    }
    const bool add_bias = bias != nullptr && end == K;
    const f32x16 b = add_bias ? load_chunk<N>(bias, column_tile) : splat(0.0f);
    LLMBUILD_UNROLL for (int r = 0; r < COUNT; ++r) {
      store_chunk<N>(yr + r * LDY, column_tile, add_bias ? sums[r] + b : sums[r]);
    }
  }

  void column_tile(int tile, int rows) const {
    alignas(64) float values[DEPTH * kLanes];
    const uint8_t* from = weight + int64_t(tile) * GRID::template TILE_BYTES<K>;
    for (int begin = 0; begin < K; begin += DEPTH) {
      const int end = std::min(K, begin + DEPTH);
      for (int k = begin; k < end; k += BLOCK) {
        const uint8_t* group = from + int64_t(k / GRID::GROUP) * GRID::GROUP_BYTES;
        GRID::dequantise_block(group, k % GRID::GROUP, values + (k - begin) * kLanes);
      }
      int row = 0;
      for (; row + ROWS <= rows; row += ROWS) add<ROWS>(values, begin, end, row, tile);
      for (; row < rows; ++row) add<1>(values, begin, end, row, tile);
    }
  }
};

// y[r, n] = sum over k of x[r, k] w[n, k], + bias[n] unless bias is null. x: fp32 [rows, K] with
// row stride LDX; otherwise as int8_linear.
template <class GRID, int N, int K, int LDX, int LDY>
void dequantised_linear(const Worker& worker, const float* x, const uint8_t* weight,
                        const float* bias, float* y, int rows) {
  const DequantisedLinear<GRID, N, K, LDX, LDY> shape{x, weight, bias, y};
  const Range tiles = split(kChunks<N>, worker);
  for (int tile = tiles.begin; tile < tiles.end; ++tile) shape.column_tile(tile, rows);
}

// y[r] = row r of x [rows, K] (row stride LDX) as Int8Row<K, A>; the rows of y have no gaps.
// STATIC: with scales[K / A] for all rows.
template <int K, int A, int LDX, bool STATIC = false>
void quantise_rows(const Worker& worker, const float* x, uint8_t* y, int rows,
                   const float* scales = nullptr) {
  const Range range = split(rows, worker);
  for (int64_t row = range.begin; row < range.end; ++row) {
    quantise_row<K, A, STATIC>(x + row * LDX, y + row * Int8Row<K, A>::BYTES, scales);
  }
}

}  // namespace llmbuild
