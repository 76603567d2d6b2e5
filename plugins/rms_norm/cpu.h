// RMSNorm over whole rows or groups of them, alone or after a residual addition; its result as fp32
// or, for quantised linears, as int8 rows.
#pragma once

#include <cmath>

#include "../common/dtype.h"
#include "../common/int8_rows.h"
#include "../common/team.h"

namespace llmbuild {

// y = x / sqrt(mean(x^2) + eps) * weight over N contiguous values; y may be x.
template <int N>
inline void rms_norm_row(const float* x, const float* weight, float eps, float* y) {
  f32x16 squares = splat(0.0f);
  for (int i = 0; i < kChunks<N>; ++i) {
    const f32x16 value = load_chunk<N>(x, i);
    squares = multiply_add(value, value, squares);
  }
  const f32x16 scale = splat(1.0f / std::sqrt(lane_sum(squares) / N + eps));
  for (int i = 0; i < kChunks<N>; ++i) {
    store_chunk<N>(y, i, load_chunk<N>(x, i) * scale * load_chunk<N>(weight, i));
  }
}

// Each row of N values is N / GROUP groups; each is normalised by its own RMS and scaled by
// weight[GROUP]. x, y: [rows, N] with row strides LDX, LDY.
template <int N, int GROUP, int LDX, int LDY>
void rms_norm(const Worker& worker, const float* x, const float* weight, float eps, float* y,
              int rows) {
  static_assert(N % GROUP == 0);
  constexpr int GROUPS = N / GROUP;
  const Range units = split(rows * GROUPS, worker);
  for (int unit = units.begin; unit < units.end; ++unit) {
    const int64_t row = unit / GROUPS;
    const int offset = unit % GROUPS * GROUP;
    rms_norm_row<GROUP>(x + row * LDX + offset, weight, eps, y + row * LDY + offset);
  }
}

// The RMSNorm of whole rows as int8 rows, A columns to a scale; STATIC: of scales[N / A].
template <int N, int A, int LDX, bool STATIC = false>
void rms_norm_int8(const Worker& worker, const float* x, const float* weight, float eps,
                   uint8_t* y, int rows, const float* scales = nullptr) {
  const Range range = split(rows, worker);
  for (int64_t row = range.begin; row < range.end; ++row) {
    alignas(64) float normed[N];
    rms_norm_row<N>(x + row * LDX, weight, eps, normed);
    quantise_row<N, A, STATIC>(normed, y + row * Int8Row<N, A>::BYTES, scales);
  }
}

template <int N>
inline void add_row(const float* a, const float* b, float* sum) {
  for (int i = 0; i < kChunks<N>; ++i) {
    store_chunk<N>(sum, i, load_chunk<N>(a, i) + load_chunk<N>(b, i));
  }
}

// sum = x + residual, y = RMSNorm(sum) * weight. x, residual, sum, y: [rows, N] with row strides
// LDX, LDR, LDS, LDY. sum may be residual.
template <int N, int LDX, int LDR, int LDS, int LDY>
void add_rms_norm(const Worker& worker, const float* x, const float* residual,
                  const float* weight, float eps, float* sum, float* y, int rows) {
  const Range range = split(rows, worker);
  for (int64_t row = range.begin; row < range.end; ++row) {
    float* total = sum + row * LDS;
    add_row<N>(x + row * LDX, residual + row * LDR, total);
    rms_norm_row<N>(total, weight, eps, y + row * LDY);
  }
}

// The same with y as int8 rows, A columns to a scale; STATIC: of scales[N / A].
template <int N, int LDX, int LDR, int LDS, int A, bool STATIC = false>
void add_rms_norm_int8(const Worker& worker, const float* x, const float* residual,
                       const float* weight, float eps, float* sum, uint8_t* y, int rows,
                       const float* scales = nullptr) {
  const Range range = split(rows, worker);
  for (int64_t row = range.begin; row < range.end; ++row) {
    alignas(64) float normed[N];
    float* total = sum + row * LDS;
    add_row<N>(x + row * LDX, residual + row * LDR, total);
    rms_norm_row<N>(total, weight, eps, normed);
    quantise_row<N, A, STATIC>(normed, y + row * Int8Row<N, A>::BYTES, scales);
  }
}

}  // namespace llmbuild
