// What a pipeline stage hands to the next.
#pragma once

#include "../common/ranks.h"

namespace llmbuild {

// x: [rows, N], without gaps, to the next stage's rank of the same tp_rank.
template <int N>
void send_rows(const Worker& worker, Ranks& ranks, const float* x, int rows) {
  if (worker.id == 0) ranks.send(ranks.rank + ranks.tp, x, int64_t(4) * rows * N);
}

// y: the same, from the stage before.
template <int N>
void receive_rows(const Worker& worker, Ranks& ranks, float* y, int rows) {
  if (worker.id == 0) ranks.receive(ranks.rank - ranks.tp, y, int64_t(4) * rows * N);
}

}  // namespace llmbuild
