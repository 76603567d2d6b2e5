// The sum over the ranks that share a layer.
#pragma once

#include "../common/ranks.h"

namespace llmbuild {

// x: [rows, N], without gaps: every rank's becomes the sum of all, in place.
template <int N>
void all_reduce(const Worker& worker, Ranks& ranks, float* x, int rows) {
  ranks.all_reduce(worker, x, int64_t(rows) * N);
}

}  // namespace llmbuild
