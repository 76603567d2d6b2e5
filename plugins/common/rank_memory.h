// Ranks on one machine, which meet in memory that they share.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ranks.h"
#include "stream.h"
#include "vec.h"

namespace llmbuild {

// A number on a cache line of its own.
struct alignas(64) Counter {
  std::atomic<uint64_t> value;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters are shared by processes");
static_assert(std::atomic<int32_t>::is_always_lock_free, "`failed` is shared by processes");

// Where everything lies in the memory: `failed`; of each rank whom it waits for, and, where several
// share a layer, the two counters and the two slots of its all-reduce; and a channel for each
// ordered pair that talks.
struct RankMemory {
  static constexpr int64_t kLine = sizeof(Counter);
  static constexpr int64_t kMaxSlotFloats = 1 << 18;  // also of what a channel holds

  // max_floats: the most that is reduced, or sent, at once; more than fits goes in pieces.
  RankMemory(int tp, int pp, int64_t max_floats)
      : tp(tp),
        pp(pp),
        slot_floats(whole_lines(4 * std::min(max_floats, kMaxSlotFloats)) / 4),
        channel_bytes(whole_lines(4 * std::min(max_floats, kMaxSlotFloats))) {}

  int world() const { return tp * pp; }

  // Hidden rows go to the next stage, logits to rank 0, candidates to the chief, who sends tokens to
  // the first stage.
  bool talks(int from, int to) const {
    const int chief = (pp - 1) * tp;
    if (from == to) return false;
    const bool hands_on = to == from + tp;
    const bool has_logits = from >= chief && (to == 0 || to == chief);
    return hands_on || has_logits || (from == chief && to < tp);
  }

  int64_t waits_offset(int rank) const { return kLine + rank * kLine; }
  int64_t reduce_bytes() const { return tp == 1 ? 0 : 2 * kLine + 2 * 4 * slot_floats; }
  int64_t reduce_offset(int rank) const { return waits_offset(world()) + rank * reduce_bytes(); }

  // Of channel (from, to), or of its end if that is (world, 0).
  int64_t channel_offset(int from, int to) const {
    int64_t before = 0;
    for (int pair = 0; pair < from * world() + to; ++pair) {
      before += talks(pair / world(), pair % world());
    }
    return reduce_offset(world()) + before * (2 * kLine + channel_bytes);
  }

  int64_t bytes() const { return channel_offset(world(), 0); }

  static int64_t whole_lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

  const int tp, pp;
  const int64_t slot_floats, channel_bytes;
};

// Bytes of shared memory that the ranks need.
inline int64_t ranks_bytes(int tp, int pp, int64_t max_floats) {
  return RankMemory(tp, pp, max_floats).bytes();
}

class MemoryRanks final : public Ranks {
 public:
  // Throws std::invalid_argument where the memory is too small.
  MemoryRanks(const RanksConfig& config, int64_t max_floats)
      : Ranks(config, reinterpret_cast<std::atomic<int32_t>*>(config.memory)),
        layout_(tp, pp, max_floats),
        memory_(config.memory) {
    if (config.memory_bytes < layout_.bytes()) {
      throw std::invalid_argument("the ranks' memory is too small");
    }
    const int first = rank - tp_rank();
    for (int t = 0; t < tp; ++t) {
      uint8_t* const area = memory_ + layout_.reduce_offset(first + t);
      float* const slots = reinterpret_cast<float*>(area + 2 * RankMemory::kLine);
      written_.push_back(reinterpret_cast<Counter*>(area));
      reduced_.push_back(reinterpret_cast<Counter*>(area) + 1);
      slots_[0].push_back(slots);
      slots_[1].push_back(slots + layout_.slot_floats);
    }
    for (int other = 0; other < layout_.world(); ++other) {
      waits_.push_back(reinterpret_cast<Counter*>(memory_ + layout_.waits_offset(other)));
      to_.push_back(channel(rank, other));
      from_.push_back(channel(other, rank));
    }
  }

  void all_reduce(const Worker& worker, float* x, int64_t count) override {
    if (count == 0 || tp == 1) return;
    uint64_t sequence = sequence_;
    for (int64_t begin = 0; begin < count; begin += layout_.slot_floats) {
      const int piece = int(std::min(count - begin, layout_.slot_floats));
      if (tp > 2 && piece >= kScatterFloats) {
        reduce_scattered(worker, x + begin, piece, ++sequence);
      } else {
        reduce_at_once(worker, x + begin, piece, ++sequence);
      }
    }
    // All workers have read it: each has been at a barrier since.
    if (worker.id == 0) sequence_ = sequence;
  }

  void send(int to, const void* data, int64_t bytes) override {
    const Channel& channel = to_[to];
    const uint8_t* from = static_cast<const uint8_t*>(data);
    uint64_t end = channel.written->value.load(std::memory_order_relaxed);
    const auto room = [&] {
      const uint64_t taken = channel.read->value.load(std::memory_order_acquire);
      return layout_.channel_bytes - int64_t(end - taken);
    };
    while (bytes > 0) {
      if (!await(to, [&] { return room() > 0; })) return;
      const int64_t piece = piece_of(std::min(bytes, room()), end);
      stream_copy(channel.ring + end % layout_.channel_bytes, from, piece);
      channel.written->value.store(end += piece, std::memory_order_release);
      from += piece, bytes -= piece;
    }
  }

  void receive(int from, void* data, int64_t bytes) override {
    const Channel& channel = from_[from];
    uint8_t* to = static_cast<uint8_t*>(data);
    uint64_t begin = channel.read->value.load(std::memory_order_relaxed);
    const auto there = [&] {
      return int64_t(channel.written->value.load(std::memory_order_acquire) - begin);
    };
    while (bytes > 0) {
      if (!await(from, [&] { return there() > 0; })) return;
      const int64_t piece = piece_of(std::min(bytes, there()), begin);
      std::memcpy(to, channel.ring + begin % layout_.channel_bytes, piece);
      channel.read->value.store(begin += piece, std::memory_order_release);
      to += piece, bytes -= piece;
    }
  }

 private:
  // From here on two passes over a share each cost less than one over everything.
  static constexpr int kScatterFloats = 1 << 14;
  static constexpr int64_t kPieceBytes = 1 << 16;  // so that both ends copy at the same time

  struct Channel {
    Counter *written, *read;  // bytes, since the beginning
    uint8_t* ring;
  };

  // Waits for what `awaited` is to bring about. False when the ranks have failed, which they have
  // once the time is over.
  template <class Ready>
  bool await(int awaited, Ready ready) {
    constexpr int kSpins = 2000, kSpinsUnseen = 1024;  // before yielding; between two looks
    for (int spins = 0; spins < kSpins; ++spins) {
      if (ready()) return true;
      if (spins % kSpinsUnseen == 0 && failed()) return false;
      cpu_pause();
    }
    return await_long(awaited, ready);
  }

  template <class Ready>
  bool await_long(int awaited, Ready ready) {
    const Clock::time_point deadline = Clock::now() + timeout_;
    std::atomic<uint64_t>& waits_for = waits_[rank]->value;
    waits_for.store(1 + awaited, std::memory_order_relaxed);
    bool is_ready = false;
    while (!(is_ready = ready()) && !failed()) {
      if (Clock::now() < deadline) {
        sched_yield();
      } else {
        mark_failed(culprit(awaited));
      }
    }
    waits_for.store(0, std::memory_order_relaxed);
    return is_ready;
  }

  // The end of the chain of ranks that each wait for the next: who began to wait first sees the end
  // of the time first, and that is seldom who waits for the one that is stuck.
  int culprit(int awaited) const {
    for (int links = 0; links < layout_.world(); ++links) {
      const int next = int(waits_[awaited]->value.load(std::memory_order_relaxed)) - 1;
      if (next < 0 || next == rank) break;
      awaited = next;
    }
    return awaited;
  }

  // Of no use for a pair that doesn't talk.
  Channel channel(int from, int to) const {
    Counter* const counters =
        reinterpret_cast<Counter*>(memory_ + layout_.channel_offset(from, to));
    return {counters, counters + 1, reinterpret_cast<uint8_t*>(counters + 2)};
  }

  // Of `bytes` from a position in the ring, those that are copied together.
  int64_t piece_of(int64_t bytes, uint64_t position) const {
    const int64_t to_end = layout_.channel_bytes - int64_t(position % layout_.channel_bytes);
    return std::min(std::min(bytes, kPieceBytes), to_end);
  }

  // Everyone sums everything. A slot is written again two pieces later: until then every rank has
  // written its next one, so it has read this one.
  void reduce_at_once(const Worker& worker, float* x, int count, uint64_t sequence) {
    float* const* const slots = slots_[sequence % 2].data();
    const Range own = range(0, count, worker);
    write(slots[tp_rank()], x, own);
    publish(worker, written_, sequence);
    if (await_all(written_, sequence)) sum(slots, x, own);
  }

  // Everyone sums its share, which the others then take.
  void reduce_scattered(const Worker& worker, float* x, int count, uint64_t sequence) {
    float* const* const slots = slots_[sequence % 2].data();
    const Range own = share(count, tp_rank(), worker);
    for (int t = 0; t < tp; ++t) {
      if (t != tp_rank()) write(slots[tp_rank()], x, share(count, t, worker));
    }
    publish(worker, written_, sequence);
    if (await_all(written_, sequence)) sum(slots, x, own);
    write(slots[tp_rank()], x, own);
    publish(worker, reduced_, sequence);
    if (!await_all(reduced_, sequence)) return;
    for (int t = 0; t < tp; ++t) {
      if (t != tp_rank()) copy(x, slots[t], share(count, t, worker));
    }
  }

  // Once a wait has failed others may still read the slot.
  void write(float* slot, const float* x, Range range) const {
    if (!failed()) stream_copy(slot + range.begin, x + range.begin, bytes_of(range));
  }

  static void copy(float* to, const float* from, Range range) {
    std::memcpy(to + range.begin, from + range.begin, bytes_of(range));
  }

  static int64_t bytes_of(Range range) { return int64_t(sizeof(float)) * (range.end - range.begin); }

  // Tells the group that the whole team has done its work of this sequence number. Workers always
  // come to the barrier, also those that see a failure before others do.
  void publish(const Worker& worker, const std::vector<Counter*>& counters, uint64_t sequence) {
    worker.barrier();
    if (worker.id == 0) counters[tp_rank()]->value.store(sequence, std::memory_order_release);
  }

  bool await_all(const std::vector<Counter*>& counters, uint64_t sequence) {
    for (int t = 0; t < tp; ++t) {
      const std::atomic<uint64_t>& value = counters[t]->value;
      const auto is_there = [&] { return value.load(std::memory_order_acquire) >= sequence; };
      if (!await(rank - tp_rank() + t, is_there)) return false;
    }
    return true;
  }

  // A worker's part of those that tp_rank t sums.
  Range share(int count, int t, const Worker& worker) const {
    const Range whole = range(0, count, Worker{t, tp});
    return range(whole.begin, whole.end, worker);
  }

  // A worker's part of the floats from `begin` to `end`, in whole cache lines.
  static Range range(int begin, int end, const Worker& worker) {
    const Range lines = split((end - begin + kLanes - 1) / kLanes, worker);
    return {begin + std::min(end - begin, lines.begin * kLanes),
            begin + std::min(end - begin, lines.end * kLanes)};
  }

  // x[i] = the sum of all ranks' parts in their order, of which x has the own.
  void sum(float* const* slots, float* x, Range range) const {
    constexpr int kVectors = 4;
    const int own = tp_rank();
    const auto part = [&](int t) { return t == own ? x : slots[t]; };
    int i = range.begin;
    for (; i + kVectors * kLanes <= range.end; i += kVectors * kLanes) {
      f32x16 sums[kVectors];
      LLMBUILD_UNROLL for (int v = 0; v < kVectors; ++v) sums[v] = load(part(0) + i + v * kLanes);
      for (int t = 1; t < tp; ++t) {
        LLMBUILD_UNROLL for (int v = 0; v < kVectors; ++v) {
          sums[v] = sums[v] + load(part(t) + i + v * kLanes);
        }
      }
      LLMBUILD_UNROLL for (int v = 0; v < kVectors; ++v) store(x + i + v * kLanes, sums[v]);
    }
    for (; i < range.end; ++i) {
      float total = part(0)[i];
      for (int t = 1; t < tp; ++t) total += part(t)[i];
      x[i] = total;
    }
  }

  const RankMemory layout_;
  uint8_t* const memory_;
  std::vector<Counter*> waits_;              // 1 + whom each rank has been waiting for, or 0
  std::vector<Counter*> written_, reduced_;  // of the group, by tp_rank
  std::vector<float*> slots_[2];             // by the sequence number's parity
  std::vector<Channel> to_, from_;           // by the other rank
  uint64_t sequence_ = 0;                    // of the last piece that was reduced
};

}  // namespace llmbuild
