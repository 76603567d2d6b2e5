// y = x W^T (+ bias) with fp32 or bf16 weights and fp32 accumulation.
#pragma once

#include <algorithm>

#include "../common/dtype.h"
#include "../common/team.h"

namespace llmbuild {

// Register tiles: ROWS rows of x by TILES column tiles (16 outputs each).
constexpr int kLinearRows = kVectorRegisters >= 32 ? 8 : kVectorRegisters >= 8 ? 4 : 2;
constexpr int kLinearTiles = kVectorRegisters >= 32 ? 3 : 1;
constexpr int kLinearTilesOneRow = kVectorRegisters >= 8 ? 4 : 2;

// One linear of fixed shape. Invariant: every output is one chain of multiply-adds over k in
// ascending order, then the bias; tile shape, K block, row count and thread count don't enter.
template <class W, int N, int K, int LDX, int LDY>
struct Linear {
  // Weights of a tile group this deep stay in L2 while many rows stream by.
  static constexpr int K_BLOCK = 2048;
  static constexpr int PREFETCH_ROWS = std::min(K, 256);

  const float* x;
  const W* weight;
  const float* bias;
  float* y;

  // Outputs [ROWS, 16 * TILES] from `row` and `column_tile` on, over k in [k_begin, k_end); partial
  // sums of earlier k are taken from y.
  template <int ROWS, int TILES>
  __attribute__((noinline)) void tile(int row, int column_tile, int k_begin, int k_end) const {
    const float* xr = x + int64_t(row) * LDX;
    const W* w = weight + int64_t(column_tile) * K * kLanes;
    float* yr = y + int64_t(row) * LDY;
    f32x16 sums[ROWS][TILES];
    LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
      LLMBUILD_UNROLL for (int t = 0; t < TILES; ++t) {
        sums[r][t] = k_begin == 0 ? splat(0.0f) : load_chunk<N>(yr + r * LDY, column_tile + t);
      }
    }
    for (int k = k_begin; k < k_end; ++k) {
      if constexpr (ROWS == 1) prefetch<TILES>(w, k);
      f32x16 column[TILES];
      LLMBUILD_UNROLL for (int t = 0; t < TILES; ++t) {
        column[t] = load(w + (int64_t(t) * K + k) * kLanes);
      }
      LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
        const f32x16 value = splat(xr[r * LDX + k]);
        LLMBUILD_UNROLL for (int t = 0; t < TILES; ++t) {
          sums[r][t] = multiply_add(column[t], value, sums[r][t]);
        }
      }
    }
    const bool add_bias = bias != nullptr && k_end == K;
    LLMBUILD_UNROLL for (int t = 0; t < TILES; ++t) {
      const f32x16 b = add_bias ? load_chunk<N>(bias, column_tile + t) : splat(0.0f);
      LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
        store_chunk<N>(yr + r * LDY, column_tile + t, add_bias ? sums[r][t] + b : sums[r][t]);
      }
    }
  }

  // Asks the L2 for the weights that the tile group at `w` reads PREFETCH_ROWS after row k, running
  // on into the next group: with a small K each stream is too short for the hardware to follow.
  template <int TILES>
  static LLMBUILD_INLINE void prefetch(const W* w, int k) {
    constexpr int ROW_BYTES = kLanes * sizeof(W);
    if (k * ROW_BYTES % 64 != 0) return;
    const int ahead = k + PREFETCH_ROWS;
    const int64_t row = ahead < K ? ahead : ahead + int64_t(TILES - 1) * K;
    LLMBUILD_UNROLL for (int t = 0; t < TILES; ++t) {
      __builtin_prefetch(w + (row + int64_t(t) * K) * kLanes, 0, 2);
    }
  }

  // Rows [row, rows), ROWS at a time, then the rest in halves of that.
  template <int ROWS, int TILES>
  void rows_from(int row, int rows, int column_tile, int k_begin, int k_end) const {
    for (; row + ROWS <= rows; row += ROWS) tile<ROWS, TILES>(row, column_tile, k_begin, k_end);
    if constexpr (ROWS > 1) rows_from<ROWS / 2, TILES>(row, rows, column_tile, k_begin, k_end);
  }

  template <int ROWS, int TILES>
  void columns(int rows, int column_tile) const {
    const int k_step = rows <= ROWS ? K : K_BLOCK;
    for (int k = 0; k < K; k += k_step) {
      rows_from<ROWS, TILES>(0, rows, column_tile, k, std::min(K, k + k_step));
    }
  }

  template <int ROWS, int TILES>
  void tile_groups(Range column_tiles, int rows) const {
    int tile = column_tiles.begin;
    for (; tile + TILES <= column_tiles.end; tile += TILES) columns<ROWS, TILES>(rows, tile);
    if constexpr (TILES > 1) {
      for (; tile < column_tiles.end; ++tile) columns<ROWS, 1>(rows, tile);
    }
  }

  // All rows of some column tiles.
  void run(Range column_tiles, int rows) const {
    if (rows == 1) {
      tile_groups<1, kLinearTilesOneRow>(column_tiles, rows);
    } else {
      tile_groups<kLinearRows, kLinearTiles>(column_tiles, rows);
    }
  }
};

// y[r, n] = sum over k of x[r, k] weight[n, k], + bias[n] unless bias is null. x: [rows, K] with
// row stride LDX. y: [rows, N] with row stride LDY. weight: packed [ceil(N/16)][K][16], zero rows
// for padding. Each weight is read by one worker.
template <class W, int N, int K, int LDX, int LDY>
void linear(const Worker& worker, const float* x, const W* weight, const float* bias, float* y,
            int rows) {
  const Linear<W, N, K, LDX, LDY> shape{x, weight, bias, y};
  shape.run(split(kChunks<N>, worker), rows);
}

}  // namespace llmbuild
