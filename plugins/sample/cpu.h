// The likeliest token of each row of logits: greedy sampling without handing the logits on.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../common/team.h"
#include "../common/vec.h"

namespace llmbuild {

// The first of the largest values of a range of a row; the first NaN, if there is one.
struct Best {
  float value;
  int32_t token;
};

inline bool beats(float challenger, float best) {
  return challenger > best || (std::isnan(challenger) && !std::isnan(best));
}

// Best of the count > 0 values from `row` on, tokens counted from `first`.
inline Best best_of_range(const float* row, int32_t first, int count) {
  Best best{row[0], first};
  for (int i = 1; i < count; ++i) {
    if (beats(row[i], best.value)) best = {row[i], first + i};
  }
  return best;
}

// The largest value of `count` values, a multiple of 16; NaN if one of them is NaN or +inf.
inline float checked_maximum(const float* values, int count) {
  const f32x16 lowest = splat(std::numeric_limits<float>::lowest());
  f32x16 largest = lowest, spoilt = splat(0.0f);
  for (int i = 0; i < count; i += kLanes) {
    const f32x16 value = maximum(lowest, load(values + i));  // keeps NaN, makes -inf finite
    largest = maximum(value, largest);
    spoilt = spoilt + (value - value);  // NaN from the first NaN or +inf on
  }
  return lane_maximum(largest) + lane_sum(spoilt);
}

constexpr int kBestBlock = 1024;  // columns whose maximum is taken before a token is looked for

// This worker's part of every row: the best token of its columns. logits: [rows, N], row stride N.
// parts: [worker.count, rows]; a worker without columns leaves {-inf, -1}.
template <int N>
void best_of_columns(const Worker& worker, const float* logits, Best* parts, int rows) {
  const Range blocks = split((N + kBestBlock - 1) / kBestBlock, worker);
  for (int r = 0; r < rows; ++r) {
    const float* row = logits + int64_t(r) * N;
    Best best{-std::numeric_limits<float>::infinity(), -1};
    for (int block = blocks.begin; block < blocks.end; ++block) {
      const int first = block * kBestBlock, count = std::min(kBestBlock, N - first);
      const bool is_whole = count % kLanes == 0;
      if (is_whole && checked_maximum(row + first, count) <= best.value) continue;
      const Best own = best_of_range(row + first, first, count);
      if (best.token < 0 || beats(own.value, best.value)) best = own;
    }
    parts[int64_t(worker.id) * rows + r] = best;
  }
}

// The best of row `row` by all workers' parts, ties to the lowest id.
inline Best best_of_parts(const Best* parts, int workers, int rows, int row) {
  Best best{0.0f, -1};
  for (int worker = 0; worker < workers; ++worker) {
    const Best part = parts[int64_t(worker) * rows + row];
    if (part.token < 0) continue;
    if (best.token < 0 || beats(part.value, best.value)) best = part;
  }
  return best;
}

// The likeliest token of row `row`. Where the best value isn't finite (NaN, +inf, or -inf alone) it
// comes as ~id, which is negative.
inline int32_t best_token(const Best* parts, int workers, int rows, int row) {
  const Best best = best_of_parts(parts, workers, rows, row);
  return std::isfinite(best.value) ? best.token : ~best.token;
}

}  // namespace llmbuild
