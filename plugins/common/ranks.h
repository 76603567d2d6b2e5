// The ranks that run a model together, one process each: what every transport between them has.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "team.h"

namespace llmbuild {

// As in runtime/executors/cpu.py, field for field.
struct RanksConfig {
  int32_t rank, tp, pp;         // rank = stage * tp + tp_rank
  int32_t timeout_ms;           // longest that a rank is waited for
  uint8_t* memory;              // shared by all ranks and zeroed at first; null: sockets are used
  int64_t memory_bytes;         // at least ranks_bytes() of rank_memory.h
  const int32_t* sockets;       // [tp * pp], streams to the others; null where there is memory
  const int32_t* token_firsts;  // [tp + 1]: tp_rank t has tokens token_firsts[t] to ...[t + 1] - 1
};

// One rank's view of all. Once a rank has failed, every call returns at once, and what it was to
// fill holds anything; failed() tells.
class Ranks {
 public:
  virtual ~Ranks() = default;

  // x[i] = the sum of the tensor-parallel group's x[i] in the order of tp_rank, so the same bits on
  // each. Every worker of the team calls it, and a barrier comes before the next call.
  virtual void all_reduce(const Worker& worker, float* x, int64_t count) = 0;

  // A stream of bytes from each rank to each other, in order; returns when all are under way or
  // here. One thread at a time. A message may be sent whole and received in parts. Sums may take the
  // same way: of all that two ranks do together, both have the same order.
  virtual void send(int to, const void* data, int64_t bytes) = 0;
  virtual void receive(int from, void* data, int64_t bytes) = 0;

  bool failed() const { return failed_->load(std::memory_order_relaxed) != 0; }

  // The first rank that failed, -1 for none.
  int failed_rank() const { return failed_->load(std::memory_order_relaxed) - 1; }

  int tp_rank() const { return rank % tp; }

  // The last stage's first rank, which chooses tokens.
  int chief() const { return (pp - 1) * tp; }

  const int rank, tp, pp;
  const std::vector<int32_t> token_firsts;  // [tp + 1]

 protected:
  using Clock = std::chrono::steady_clock;

  // failed: 0, or 1 + the rank that failed; it outlives this.
  Ranks(const RanksConfig& config, std::atomic<int32_t>* failed)
      : rank(config.rank),
        tp(config.tp),
        pp(config.pp),
        token_firsts(config.token_firsts, config.token_firsts + config.tp + 1),
        timeout_(config.timeout_ms),
        failed_(failed) {}

  void mark_failed(int culprit) {
    int32_t none = 0;
    failed_->compare_exchange_strong(none, 1 + culprit);
  }

  const std::chrono::milliseconds timeout_;

 private:
  std::atomic<int32_t>* const failed_;
};

}  // namespace llmbuild
