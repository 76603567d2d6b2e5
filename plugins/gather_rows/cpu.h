// Rows of a table by index, as fp32: token embeddings, and the rows that need logits.
#pragma once

#include "../common/dtype.h"
#include "../common/grid.h"
#include "../common/team.h"

namespace llmbuild {

// y[r] = float(table[index[r]]). table: [any, N] row-major, W float or bf16. index: [rows].
// y: [rows, N] with row stride LDY.
template <class W, int N, int LDY>
void gather_rows(const Worker& worker, const W* table, const int32_t* index, float* y, int rows) {
  const Range range = split(rows, worker);
  for (int64_t row = range.begin; row < range.end; ++row) {
    const W* from = table + int64_t(index[row]) * N;
    for (int i = 0; i < kChunks<N>; ++i) {
      store_chunk<N>(y + row * LDY, i, load_chunk<N>(from, i));
    }
  }
}

// The same from a table that a linear also reads, packed [ceil(rows / 16)][N][16].
template <class W, int N, int LDY>
void gather_tiled_rows(const Worker& worker, const W* table, const int32_t* index, float* y,
                       int rows) {
  const Range range = split(rows, worker);
  for (int64_t row = range.begin; row < range.end; ++row) {
    const W* from = table + int64_t(index[row] / kLanes) * N * kLanes + index[row] % kLanes;
    for (int n = 0; n < N; ++n) y[row * LDY + n] = to_float(from[n * kLanes]);
  }
}

// The same from a quantised table that a linear also reads, packed on GRID.
template <class GRID, int K, int LDY>
void gather_quantised_rows(const Worker& worker, const uint8_t* table, const int32_t* index,
                           float* y, int rows) {
  const Range range = split(rows, worker);
  for (int64_t row = range.begin; row < range.end; ++row) {
    const uint8_t* group = table + index[row] / kLanes * int64_t(GRID::template TILE_BYTES<K>);
    for (int k = 0; k < K; k += GRID::GROUP, group += GRID::GROUP_BYTES) {
      GRID::dequantise_row(group, index[row] % kLanes, y + row * LDY + k);
    }
  }
}

}  // namespace llmbuild
