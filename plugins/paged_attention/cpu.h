// Attention of a ragged batch over a paged KV cache (MHA, GQA, MQA; causal; sliding window;
// soft-capped scores; attention sinks).
//
// A unit of work is a few consecutive tokens of one sequence and one KV head. It walks the keys in
// groups of 16 positions, counted from position 0, and keeps one online softmax per query row, so
// each block of K and V is read once for all query heads of its group and all tokens of the unit.
// Invariant: a query row sees the same groups in the same order with the same sums whatever the
// batch, the chunking of a prefill, the block size and the thread count are. Slots outside
// [first key, own position] are never read into a result.
#pragma once

#include <algorithm>

#include "../common/dtype.h"
#include "../common/step.h"
#include "../common/team.h"
#include "../common/vec_math.h"

namespace llmbuild {

// Query rows and 16-lane chunks of D in one register tile.
constexpr int kScoreRows = kVectorRegisters >= 32 ? 8 : kVectorRegisters >= 8 ? 2 : 1;
constexpr int kValueHeads = kVectorRegisters >= 32 ? 4 : kVectorRegisters >= 8 ? 2 : 1;
constexpr int kValueChunks = kVectorRegisters >= 32 ? 4 : kVectorRegisters >= 8 ? 2 : 1;

// to[d][j] = from[j][d] for d < D and four keys j.
template <int D, class KV>
inline void transpose_four_keys(const KV* const from[4], float* to) {
  constexpr int WHOLE = D / 4 * 4;
  for (int d = 0; d < WHOLE; d += 4) {
    const f32x4 a = load<f32x4>(from[0] + d), b = load<f32x4>(from[1] + d);
    const f32x4 c = load<f32x4>(from[2] + d), e = load<f32x4>(from[3] + d);
    const f32x4 ab_lo = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    const f32x4 ab_hi = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const f32x4 ce_lo = __builtin_shufflevector(c, e, 0, 4, 1, 5);
    const f32x4 ce_hi = __builtin_shufflevector(c, e, 2, 6, 3, 7);
    store(to + d * kLanes, f32x4(__builtin_shufflevector(ab_lo, ce_lo, 0, 1, 4, 5)));
    store(to + (d + 1) * kLanes, f32x4(__builtin_shufflevector(ab_lo, ce_lo, 2, 3, 6, 7)));
    store(to + (d + 2) * kLanes, f32x4(__builtin_shufflevector(ab_hi, ce_hi, 0, 1, 4, 5)));
    store(to + (d + 3) * kLanes, f32x4(__builtin_shufflevector(ab_hi, ce_hi, 2, 3, 6, 7)));
  }
  for (int d = WHOLE; d < D; ++d) {
    for (int j = 0; j < 4; ++j) to[d * kLanes + j] = to_float(from[j][d]);
  }
}

// Keys [16] of one group as columns, values as rows padded with zeros to whole chunks.
template <class KV, int HKV, int D, int BS>
struct KeyGroup {
  static constexpr int CHUNKS = kChunks<D>;
  alignas(64) float keys[D][kLanes];
  alignas(64) float values[kLanes][CHUNKS * kLanes];

  // Loads positions [begin, end) of the group that starts at position `start`. Lanes before and
  // after hold copies of loaded ones, never what an unwritten slot holds.
  void read(const KV* k_pool, const KV* v_pool, const int32_t* block_table, int head, int start,
            int begin, int end) {
    for (int j = 0; j < kLanes; j += 4) {
      const KV* rows[4];
      for (int i = 0; i < 4; ++i) {
        const int position = std::clamp(start + j + i, begin, end - 1);
        rows[i] = k_pool + pool_row<HKV, BS>(block_table, position, head) * D;
      }
      transpose_four_keys<D>(rows, &keys[0][j]);
    }
    for (int position = begin; position < end; ++position) {
      const KV* row = v_pool + pool_row<HKV, BS>(block_table, position, head) * D;
      for (int c = 0; c < CHUNKS; ++c) {
        store(values[position - start] + c * kLanes, load_chunk<D>(row, c));
      }
    }
  }
};

// Dot products of ROWS query rows q[., D] with the 16 keys: even and odd d apart, then added.
template <int ROWS, int D>
inline void score_rows(const float* q, const float (*keys)[kLanes], float scale, float* scores) {
  f32x16 even[ROWS], odd[ROWS];
  LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) even[r] = odd[r] = splat(0.0f);
  for (int d = 0; d < D; d += 2) {
    const f32x16 first = load(keys[d]), second = load(keys[d + 1]);
    LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
      even[r] = multiply_add(first, splat(q[r * D + d]), even[r]);
      odd[r] = multiply_add(second, splat(q[r * D + d + 1]), odd[r]);
    }
  }
  LLMBUILD_UNROLL for (int r = 0; r < ROWS; ++r) {
    store(scores + r * kLanes, (even[r] + odd[r]) * splat(scale));
  }
}

// sums = sums * correction + sum over keys [begin, end) of weight * value, for HEADS rows and
// CHUNKS chunks of D. Row strides: `stride` of sums and values, 16 of weights.
template <int HEADS, int CHUNKS>
inline void add_values(const float* weights, const float* corrections, const float* values,
                       int stride, int begin, int end, float* sums) {
  f32x16 tile[HEADS][CHUNKS];
  LLMBUILD_UNROLL for (int h = 0; h < HEADS; ++h) {
    LLMBUILD_UNROLL for (int c = 0; c < CHUNKS; ++c) {
      tile[h][c] = load(sums + h * stride + c * kLanes) * splat(corrections[h]);
    }
  }
  for (int j = begin; j < end; ++j) {
    f32x16 value[CHUNKS];
    LLMBUILD_UNROLL for (int c = 0; c < CHUNKS; ++c) {
      value[c] = load(values + j * stride + c * kLanes);
    }
    LLMBUILD_UNROLL for (int h = 0; h < HEADS; ++h) {
      const f32x16 weight = splat(weights[h * kLanes + j]);
      LLMBUILD_UNROLL for (int c = 0; c < CHUNKS; ++c) {
        tile[h][c] = multiply_add(value[c], weight, tile[h][c]);
      }
    }
  }
  LLMBUILD_UNROLL for (int h = 0; h < HEADS; ++h) {
    LLMBUILD_UNROLL for (int c = 0; c < CHUNKS; ++c) {
      store(sums + h * stride + c * kLanes, tile[h][c]);
    }
  }
}

// What of the softmax is the same for every query of a call.
struct Scoring {
  float scale;
  int window;
  float soft_cap;
  const float* sinks;
};

// A unit: up to TOKENS tokens of one sequence, the GROUP query heads of one KV head. Query rows are
// ordered by token, then head.
template <class KV, int H, int HKV, int D, int BS, int LDQ, int LDO, bool SOFT_CAP, bool SINKS>
class AttentionUnit {
 public:
  static constexpr int GROUP = H / HKV;
  static constexpr int TOKENS = GROUP >= 32 ? 1 : 32 / GROUP;

  explicit AttentionUnit(const Scoring& scoring) : scoring_(scoring) {}

  // q, out: the unit's first token and head. positions: of its `tokens` tokens.
  void run(const float* q, const KV* k_pool, const KV* v_pool, const int32_t* block_table,
           const int32_t* positions, int tokens, int head, float* out) {
    const int rows = tokens * GROUP;
    for (int r = 0; r < rows; ++r) {
      std::memcpy(q_ + r * D, q + int64_t(r / GROUP) * LDQ + r % GROUP * D, D * sizeof(float));
      start_softmax(r, head * GROUP + r % GROUP);
      for (int c = 0; c < CHUNKS; ++c) store(sums_ + r * STRIDE + c * kLanes, splat(0.0f));
    }
    const int first = first_key(positions[0], scoring_.window), end = positions[tokens - 1] + 1;
    for (int start = first / kLanes * kLanes; start < end; start += kLanes) {
      group_.read(k_pool, v_pool, block_table, head, start, std::max(start, first),
                  std::min(start + kLanes, end));
      visit(start, positions, tokens);
    }
    for (int r = 0; r < rows; ++r) {
      const f32x16 norm = splat(lane_sum(load(total_ + r * kLanes)));
      float* row = out + int64_t(r / GROUP) * LDO + r % GROUP * D;
      for (int c = 0; c < CHUNKS; ++c) {
        store_chunk<D>(row, c, load(sums_ + r * STRIDE + c * kLanes) / norm);
      }
    }
  }

  static int first_key(int position, int window) {
    return window > 0 ? std::max(0, position - window + 1) : 0;
  }

 private:
  static constexpr int ROWS = TOKENS * GROUP;
  static constexpr int UNIT = GROUP <= kScoreRows ? GROUP : 1;  // rows scored together
  static constexpr int CHUNKS = kChunks<D>;
  static constexpr int STRIDE = CHUNKS * kLanes;

  // Row r has seen nothing, or its head's sink alone: a logit that weighs no value.
  void start_softmax(int r, int query_head) {
    float* total = total_ + r * kLanes;
    store(total, splat(0.0f));
    maximum_[r] = -std::numeric_limits<float>::infinity();
    if constexpr (SINKS) {
      maximum_[r] = scoring_.sinks[query_head];
      total[0] = 1.0f;
    }
  }

  // One key group for all tokens that see any of it: a contiguous run of the unit's tokens.
  void visit(int start, const int32_t* positions, int tokens) {
    const int window = scoring_.window;
    int begin = 0, end = tokens;
    while (positions[begin] < start) ++begin;
    while (first_key(positions[end - 1], window) >= start + kLanes) --end;
    score<kScoreRows / UNIT * UNIT>(begin * GROUP, end * GROUP);
    for (int token = begin; token < end; ++token) {
      const int first_lane = std::max(0, first_key(positions[token], window) - start);
      const int end_lane = std::min(kLanes, positions[token] + 1 - start);
      for (int r = token * GROUP; r < (token + 1) * GROUP; ++r) {
        weigh(r, first_lane, end_lane);
      }
      accumulate<std::min(kValueHeads, GROUP)>(token * GROUP, (token + 1) * GROUP, first_lane,
                                               end_lane);
    }
  }

  template <int COUNT>
  void score(int row, int rows) {
    for (; row + COUNT <= rows; row += COUNT) {
      score_rows<COUNT, D>(q_ + row * D, group_.keys, scoring_.scale, weights_ + row * kLanes);
    }
    constexpr int NEXT = COUNT / UNIT / 2 * UNIT;
    if constexpr (NEXT > 0) score<NEXT>(row, rows);
  }

  // Online softmax: turns row r's scores of this group into weights, lanes outside
  // [first_lane, end_lane) into zeros, and notes how earlier sums shrink.
  void weigh(int r, int first_lane, int end_lane) {
    float* scores = weights_ + r * kLanes;
    if constexpr (SOFT_CAP) {
      const f32x16 cap = splat(scoring_.soft_cap);
      store(scores, cap * tanh(load(scores) / cap));
    }
    const float masked = -std::numeric_limits<float>::infinity();
    for (int j = 0; j < first_lane; ++j) scores[j] = masked;
    for (int j = end_lane; j < kLanes; ++j) scores[j] = masked;
    const f32x16 lanes = load(scores);
    const float next = std::max(lane_maximum(lanes), maximum_[r]);
    const f32x16 weights = exp(lanes - splat(next));
    corrections_[r] = front(exp(splat(maximum_[r] - next)));
    maximum_[r] = next;
    const f32x16 total = load(total_ + r * kLanes) * splat(corrections_[r]);
    store(total_ + r * kLanes, total + weights);
    store(scores, weights);
  }

  template <int HEADS>
  void accumulate(int row, int rows, int first_lane, int end_lane) {
    for (; row + HEADS <= rows; row += HEADS) {
      for (int c = 0; c + kValueChunks <= CHUNKS; c += kValueChunks) {
        add_chunks<HEADS, kValueChunks>(row, c, first_lane, end_lane);
      }
      constexpr int REST = CHUNKS % kValueChunks;
      if constexpr (REST > 0) {
        add_chunks<HEADS, REST>(row, CHUNKS - REST, first_lane, end_lane);
      }
    }
    if constexpr (HEADS > 1) accumulate<HEADS / 2>(row, rows, first_lane, end_lane);
  }

  template <int HEADS, int COUNT>
  void add_chunks(int row, int chunk, int first_lane, int end_lane) {
    add_values<HEADS, COUNT>(weights_ + row * kLanes, corrections_ + row,
                             group_.values[0] + chunk * kLanes, STRIDE, first_lane, end_lane,
                             sums_ + row * STRIDE + chunk * kLanes);
  }

  const Scoring scoring_;
  KeyGroup<KV, HKV, D, BS> group_;
  alignas(64) float q_[ROWS * D];
  alignas(64) float weights_[ROWS * kLanes];  // scores first, then weights
  alignas(64) float total_[ROWS * kLanes];    // per lane; added up at the end
  alignas(64) float sums_[ROWS * STRIDE];
  float maximum_[ROWS];
  float corrections_[ROWS];
};

// out[t, h] = softmax(scale q[t, h] . K) V over keys [max(0, p - window + 1), p] of the token's
// sequence (from 0 when window is 0), p = positions[t]. Head h uses KV head h / (H / HKV).
// SOFT_CAP: every score s becomes soft_cap tanh(s / soft_cap). SINKS: sinks[H] are further logits,
// one a query head, in the softmax's denominator alone.
// q, out: [T, H, D] with row strides LDQ, LDO. k_pool, v_pool: [blocks, HKV, BS, D], float or bf16.
// Workers take contiguous runs of units of about equal work.
// Online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
template <class KV, int H, int HKV, int D, int BS, int LDQ, int LDO, bool SOFT_CAP = false,
          bool SINKS = false>
void paged_attention(const Worker& worker, const Step& step, const float* q, const KV* k_pool,
                     const KV* v_pool, float scale, int window, float* out, float soft_cap = 0,
                     const float* sinks = nullptr) {
  static_assert(D % 2 == 0 && H % HKV == 0);
  using Unit = AttentionUnit<KV, H, HKV, D, BS, LDQ, LDO, SOFT_CAP, SINKS>;
  static_assert(sizeof(Unit) <= 512 * 1024, "a unit lies on its worker's stack");
  // Calls visit(sequence, head, first token, tokens, work) for every unit, in a fixed order.
  const auto for_each_unit = [&](auto visit) {
    for (int s = 0; s < step.num_sequences; ++s) {
      const int end = step.query_start[s + 1];
      for (int head = 0; head < HKV; ++head) {
        for (int token = step.query_start[s]; token < end; token += Unit::TOKENS) {
          const int tokens = std::min(Unit::TOKENS, end - token);
          const int last = step.positions[token + tokens - 1];
          const int keys = last + 1 - Unit::first_key(step.positions[token], window);
          // Reading a key group costs about as much as four tokens' use of it.
          visit(s, head, token, tokens, int64_t(keys + kLanes) * (tokens + 4));
        }
      }
    }
  };
  int64_t total = 0, done = 0;
  for_each_unit([&](int, int, int, int, int64_t work) { total += work; });
  Unit unit(Scoring{scale, window, soft_cap, sinks});
  for_each_unit([&](int s, int head, int token, int tokens, int64_t work) {
    // A unit belongs to the worker whose share of the work holds the unit's middle.
    const int64_t middle = done + work / 2;
    done += work;
    if (middle * worker.count / total != worker.id) return;
    const int64_t column = int64_t(head) * Unit::GROUP * D;
    unit.run(q + int64_t(token) * LDQ + column, k_pool, v_pool, step.block_table(s),
             step.positions + token, tokens, head,
             out + int64_t(token) * LDO + column);
  });
}

}  // namespace llmbuild
