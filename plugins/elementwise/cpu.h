// Any lane-wise expression over rows, given as a function.
#pragma once

#include "../common/activation.h"
#include "../common/dtype.h"
#include "../common/team.h"

namespace llmbuild {

// Value `row` of a column with row stride LD (one float a row), in every lane.
template <int LD>
LLMBUILD_INLINE f32x16 splat_row(const float* column, int64_t row) {
  return splat(column[row * LD]);
}

// Chunk i of y's row r = f(r, i), with f(int64_t row, int chunk) -> f32x16. What f gives for lanes
// past N is dropped, so it may be anything. y: [rows, N] with row stride LDY; it may be an operand
// that f reads at (r, i) alone.
template <int N, int LDY, class F>
void elementwise(const Worker& worker, float* y, int rows, F f) {
  const Range units = split(rows * kChunks<N>, worker);
  for (int unit = units.begin; unit < units.end; ++unit) {
    const int64_t row = unit / kChunks<N>;
    const int i = unit % kChunks<N>;
    store_chunk<N>(y + row * LDY, i, f(row, i));
  }
}

}  // namespace llmbuild
