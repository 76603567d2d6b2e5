// Attention of a ragged batch over a paged KV cache (MHA, GQA, MQA; causal; sliding window;
// soft-capped scores; attention sinks).
//
// Keys are cut into ranges of 128 positions, counted from position 0. A range's softmax is one
// piece, and the pieces of a row are merged in ascending order; so a row's bits don't depend on the
// batch, on the chunking of a prefill, on the block size, or on who computes which piece. Slots
// outside [first key, own position] are never read into a result.
#pragma once

#include "../common/team.h"
#include "unit.h"

namespace llmbuild {

// The units of a step in a fixed order, and whose they are. A worker has a run of about equal work;
// a unit at the border of two runs goes whole to one of them, or is cut between its ranges.
template <class Unit>
class AttentionPlan {
 public:
  struct Place {
    int sequence, head, token, tokens;
    int first_range, end_range;
    int64_t begin, work;  // of all units before, and of this one
    float* partials;      // of a cut unit, one for each of its ranges; else null
  };

  AttentionPlan(const Worker& worker, const Step& step, const Scoring& scoring, int kv_heads,
                float* scratch, int64_t scratch_floats)
      : worker_(worker), step_(step), scoring_(scoring), kv_heads_(kv_heads), scratch_(scratch),
        scratch_floats_(scratch_floats) {
    for_each_place([&](const Place& place) { total_ += place.work; });
    begin_ = total_ * worker.id / worker.count;
    end_ = total_ * (worker.id + 1) / worker.count;
  }

  // Calls visit(place) for every unit; all workers see the same.
  template <class Visit>
  void for_each(Visit visit) {
    int64_t floats = 0;
    for_each_place([&](Place& place) {
      const int ranges = place.end_range - place.first_range;
      const int64_t needed = ranges * Unit::partial_floats(place.tokens * Unit::GROUP);
      if (is_worth_cutting(place) && floats + needed <= scratch_floats_) {
        place.partials = scratch_ + floats;
        floats += needed;
      }
      visit(place);
    });
  }

  bool is_mine(const Place& place) const { return has(place.begin + place.work / 2); }

  bool is_mine(const Place& place, int range) const {
    const Keys keys = keys_of(place);
    const int before = std::max(keys.begin, range * kRangeKeys) - keys.begin;
    const int after = std::min(keys.end, (range + 1) * kRangeKeys) - keys.begin;
    const int64_t middle = work(before + after, 2 * (range - place.first_range) + 1, place.tokens);
    return has(place.begin + middle / 2);
  }

 private:
  struct Keys {
    int begin, end;
  };

  Keys keys_of(const Place& place) const {
    const int32_t* positions = step_.positions + place.token;
    return {scoring_.first_key(positions[0]), positions[place.tokens - 1] + 1};
  }

  // In units of one row and key. Beside its rows a key costs the reading, and a range its merging.
  static int64_t work(int keys, int ranges, int tokens) {
    return int64_t(keys + ranges * kLanes) * (tokens * Unit::GROUP + 2);
  }

  bool has(int64_t work) const { return begin_ <= work && work < end_; }

  // Where a border between workers falls inside of much work.
  bool is_worth_cutting(const Place& place) const {
    if (place.end_range - place.first_range < 2) return false;
    if (place.work * worker_.count * 8 < total_) return false;
    const int64_t last = place.begin + place.work - 1;
    return place.begin * worker_.count / total_ != last * worker_.count / total_;
  }

  template <class Visit>
  void for_each_place(Visit visit) const {
    int64_t done = 0;
    for (int s = 0; s < step_.num_sequences; ++s) {
      const int end = step_.query_start[s + 1];
      for (int head = 0; head < kv_heads_; ++head) {
        for (int token = step_.query_start[s]; token < end; token += Unit::TOKENS) {
          Place place{s, head, token, std::min(Unit::TOKENS, end - token), 0, 0, done, 0, nullptr};
          const Keys keys = keys_of(place);
          place.first_range = keys.begin / kRangeKeys;
          place.end_range = (keys.end + kRangeKeys - 1) / kRangeKeys;
          const int ranges = place.end_range - place.first_range;
          place.work = work(keys.end - keys.begin, ranges, place.tokens);
          done += place.work;
          visit(place);
        }
      }
    }
  }

  const Worker& worker_;
  const Step& step_;
  const Scoring& scoring_;
  const int kv_heads_;
  float* const scratch_;
  const int64_t scratch_floats_;
  int64_t total_ = 0, begin_, end_;
};

// out[t, h] = softmax(scale q[t, h] . K) V over keys [max(0, p - window + 1), p] of the token's
// sequence (from 0 when window is 0), p = positions[t]. Head h uses KV head h / (H / HKV).
// SOFT_CAP: every score s becomes soft_cap tanh(s / soft_cap). SINKS: sinks[H] are further logits,
// one a query head, in the softmax's denominator alone.
// q, out: [T, H, D] with row strides LDQ, LDO. k_pool, v_pool: as kv_pool.h says, of KeyItem and
// ValueItem; where these are codes, queries or weights are rounded to 15 bits of their largest.
// k_scale, v_scale: [HKV, D] that keys and values were divided by, or null: queries are multiplied
// by the first, and the result by the second.
// scratch: fp32 [scratch_floats] that all workers share, for units that are cut between workers;
// where it is full or null, units stay whole.
template <class KeyItem, class ValueItem, int H, int HKV, int D, int BS, int LDQ, int LDO,
          bool SOFT_CAP = false, bool SINKS = false>
void paged_attention(const Worker& worker, const Step& step, const float* q, const KeyItem* k_pool,
                     const ValueItem* v_pool, float scale, int window, float* out,
                     float soft_cap = 0, const float* sinks = nullptr, float* scratch = nullptr,
                     int64_t scratch_floats = 0, const float* k_scale = nullptr,
                     const float* v_scale = nullptr) {
  static_assert(H % HKV == 0);
  using Unit = AttentionUnit<KeyItem, ValueItem, H, HKV, D, BS, LDQ, LDO, SOFT_CAP, SINKS>;
  static_assert(sizeof(Unit) <= 512 * 1024, "a unit lies on its worker's stack");
  using Plan = AttentionPlan<Unit>;
  const Scoring scoring{scale, window, soft_cap, sinks, k_scale, v_scale};
  Plan plan(worker, step, scoring, HKV, scratch, scratch_floats);
  Unit unit(scoring);
  const auto begin = [&](const typename Plan::Place& place) {
    unit.begin(step.block_table(place.sequence), step.positions + place.token, place.tokens,
               place.head);
  };
  const auto queries = [&](const typename Plan::Place& place) {
    return q + int64_t(place.token) * LDQ + place.head * Unit::GROUP * D;
  };
  const auto finish = [&](const typename Plan::Place& place) {
    unit.finish(out + int64_t(place.token) * LDO + place.head * Unit::GROUP * D);
  };
  const auto partial = [](const typename Plan::Place& place, int range) {
    const int rows = place.tokens * Unit::GROUP, index = range - place.first_range;
    return Unit::partial_at(place.partials + int64_t(index) * Unit::partial_floats(rows), rows);
  };
  bool any_cut = false;
  plan.for_each([&](const typename Plan::Place& place) {
    const bool is_cut = place.partials != nullptr;
    any_cut |= is_cut;
    bool is_begun = false;
    for (int range = place.first_range; range < place.end_range; ++range) {
      if (!(is_cut ? plan.is_mine(place, range) : plan.is_mine(place))) continue;
      if (!is_begun) {
        begin(place);
        unit.set_queries(queries(place));
        is_begun = true;
      }
      const Partial piece = is_cut ? partial(place, range) : unit.own_partial();
      unit.attend(k_pool, v_pool, range, piece);
      if (!is_cut) unit.absorb(range, piece);
    }
    if (is_begun && !is_cut) finish(place);
  });
  if (!any_cut) return;
  worker.barrier();
  plan.for_each([&](const typename Plan::Place& place) {
    if (place.partials == nullptr || !plan.is_mine(place)) return;
    begin(place);
    for (int range = place.first_range; range < place.end_range; ++range) {
      unit.absorb(range, partial(place, range));
    }
    finish(place);
  });
}

}  // namespace llmbuild
