// Rows of a table by index, as fp32: token embeddings, and the rows that need logits.
#pragma once

#include <algorithm>

#include "../common/dtype.h"
#include "../common/grid.h"
#include "../common/team.h"

namespace llmbuild {

// Which rows of a larger table a table has: those a rank of several was given, or all.
struct OwnRows {
  int first, count;

  // Where row `row` lies in the table; -1 for one that it hasn't.
  int place(int row) const {
    const int at = row - first;
    return 0 <= at && at < count ? at : -1;
  }
};

inline void zero_row(float* y, int n) { std::fill(y, y + n, 0.0f); }

// y[r] = float(table[index[r]]), zeros for a row that the table hasn't. table: [own.count, N]
// row-major, W float or bf16. index: [rows]. y: [rows, N] with row stride LDY.
template <class W, int N, int LDY>
void gather_rows(const Worker& worker, const W* table, OwnRows own, const int32_t* index, float* y,
                 int rows) {
  const Range range = split(rows, worker);
  for (int64_t row = range.begin; row < range.end; ++row) {
    const int64_t place = own.place(index[row]);
    if (place < 0) {
      zero_row(y + row * LDY, N);
      continue;
    }
    const W* from = table + place * N;
    for (int i = 0; i < kChunks<N>; ++i) {
      store_chunk<N>(y + row * LDY, i, load_chunk<N>(from, i));
    }
  }
}

// The same from a table that a linear also reads, packed [ceil(rows / 16)][N][16].
template <class W, int N, int LDY>
void gather_tiled_rows(const Worker& worker, const W* table, OwnRows own, const int32_t* index,
                       float* y, int rows) {
  const Range range = split(rows, worker);
  for (int64_t row = range.begin; row < range.end; ++row) {
    const int64_t place = own.place(index[row]);
    if (place < 0) {
      zero_row(y + row * LDY, N);
      continue;
    }
    const W* from = table + place / kLanes * N * kLanes + place % kLanes;
    for (int n = 0; n < N; ++n) y[row * LDY + n] = to_float(from[n * kLanes]);
  }
}

// The same from a quantised table that a linear also reads, packed on GRID.
template <class GRID, int K, int LDY>
void gather_quantised_rows(const Worker& worker, const uint8_t* table, OwnRows own,
                           const int32_t* index, float* y, int rows) {
  const Range range = split(rows, worker);
  for (int64_t row = range.begin; row < range.end; ++row) {
    const int64_t place = own.place(index[row]);
    if (place < 0) {
      zero_row(y + row * LDY, K);
      continue;
    }
    const uint8_t* group = table + place / kLanes * int64_t(GRID::template TILE_BYTES<K>);
    for (int k = 0; k < K; k += GRID::GROUP, group += GRID::GROUP_BYTES) {
      GRID::dequantise_row(group, int(place % kLanes), y + row * LDY + k);
    }
  }
}

}  // namespace llmbuild
