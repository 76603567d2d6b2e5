// LayerNorm over whole rows.
#pragma once

#include <cmath>

#include "../common/dtype.h"
#include "../common/team.h"

namespace llmbuild {

// y = (x - mean) / sqrt(variance + eps) * weight + bias over N contiguous values; y may be x. The
// deviations are kept in y, so that the variance sees no padding lane.
template <int N>
inline void layer_norm_row(const float* x, const float* weight, const float* bias, float eps,
                           float* y) {
  f32x16 sum = splat(0.0f), squares = splat(0.0f);
  for (int i = 0; i < kChunks<N>; ++i) sum = sum + load_chunk<N>(x, i);
  const f32x16 mean = splat(lane_sum(sum) / N);
  for (int i = 0; i < kChunks<N>; ++i) {
    store_chunk<N>(y, i, load_chunk<N>(x, i) - mean);
    const f32x16 deviation = load_chunk<N>(y, i);
    squares = multiply_add(deviation, deviation, squares);
  }
  const f32x16 scale = splat(1.0f / std::sqrt(lane_sum(squares) / N + eps));
  for (int i = 0; i < kChunks<N>; ++i) {
    f32x16 value = load_chunk<N>(y, i) * scale;
    if (weight != nullptr) value = value * load_chunk<N>(weight, i);
    if (bias != nullptr) value = value + load_chunk<N>(bias, i);
    store_chunk<N>(y, i, value);
  }
}

// Mean and (population) variance of each row in two passes. x, y: [rows, N] with row strides LDX,
// LDY. weight, bias: [N]; null means ones and zeros.
template <int N, int LDX, int LDY>
void layer_norm(const Worker& worker, const float* x, const float* weight, const float* bias,
                float eps, float* y, int rows) {
  const Range range = split(rows, worker);
  for (int64_t row = range.begin; row < range.end; ++row) {
    layer_norm_row<N>(x + row * LDX, weight, bias, eps, y + row * LDY);
  }
}

}  // namespace llmbuild
