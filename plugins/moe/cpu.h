// Mixture of experts: route tokens, sort them by expert, run each expert's linears, add up.
//
// A (token, j) pair, j < TOP_K, is a slot; slots are numbered by expert, then token. Every kernel
// needs the outputs of the one before it whole. Invariant: what a token gets doesn't depend on the
// other tokens, nor on the team; which slots it has does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../common/dtype.h"
#include "../common/team.h"
#include "../linear/cpu.h"
#include "../linear/quantised.h"

namespace llmbuild {

// y = softmax(x) over N contiguous values; y may be x.
template <int N>
inline void softmax_row(const float* x, float* y) {
  constexpr float kMasked = -std::numeric_limits<float>::infinity();
  float padded[kChunks<N> * kLanes];
  std::memcpy(padded, x, N * sizeof(float));
  std::fill(padded + N, padded + kChunks<N> * kLanes, kMasked);
  f32x16 highest = splat(kMasked), sum = splat(0.0f);
  for (int i = 0; i < kChunks<N>; ++i) highest = maximum(highest, load(padded + i * kLanes));
  const f32x16 shift = splat(lane_maximum(highest));
  for (int i = 0; i < kChunks<N>; ++i) {
    const f32x16 value = exp(load(padded + i * kLanes) - shift);
    store(padded + i * kLanes, value);
    sum = sum + value;
  }
  const f32x16 total = splat(lane_sum(sum));
  for (int i = 0; i < kChunks<N>; ++i) {
    store_chunk<N>(y, i, load(padded + i * kLanes) / total);
  }
}

struct ScoredExpert {
  float score;
  int32_t expert;
};

// The TOP_K highest scores of E to the front of `scored`, in descending order, NaN above all. Which
// of equal scores wins follows from the algorithm; with libstdc++ these are torch.topk's on a CPU,
// so that ties fall as in the reference.
template <int E, int TOP_K>
inline void select_top_k(ScoredExpert* scored) {
  const auto above = [](const ScoredExpert& a, const ScoredExpert& b) {
    return (std::isnan(a.score) && !std::isnan(b.score)) || a.score > b.score;
  };
  if constexpr (TOP_K * 64 <= E) {
    std::partial_sort(scored, scored + TOP_K, scored + E, above);
  } else {
    std::nth_element(scored, scored + TOP_K - 1, scored + E, above);
    std::sort(scored, scored + TOP_K - 1, above);
  }
}

// Weights are the probabilities among all experts.
struct Softmax {
  template <int E>
  static void score(const float* logits, float* scores) {
    softmax_row<E>(logits, scores);
  }
  template <int TOP_K>
  static void weigh(float*) {}
};

// Weights are the probabilities among the chosen experts.
struct TopKSoftmax {
  template <int E>
  static void score(const float* logits, float* scores) {
    std::memcpy(scores, logits, E * sizeof(float));
  }
  template <int TOP_K>
  static void weigh(float* scores) {
    softmax_row<TOP_K>(scores, scores);
  }
};

// The TOP_K experts of every token, best first, and their weights by SCORING (Softmax or
// TopKSoftmax), divided by their sum when NORMALISE. logits: [rows, E] with row stride LDX.
// experts, weights: [rows, TOP_K].
template <int E, int TOP_K, class SCORING, bool NORMALISE, int LDX>
void moe_route(const Worker& worker, const float* logits, int32_t* experts, float* weights,
               int rows) {
  static_assert(1 <= TOP_K && TOP_K <= E);
  const Range range = split(rows, worker);
  for (int64_t row = range.begin; row < range.end; ++row) {
    float scores[E];
    SCORING::template score<E>(logits + row * LDX, scores);
    ScoredExpert scored[E];
    for (int e = 0; e < E; ++e) scored[e] = {scores[e], e};
    select_top_k<E, TOP_K>(scored);
    float* weight = weights + row * TOP_K;
    for (int j = 0; j < TOP_K; ++j) {
      experts[row * TOP_K + j] = scored[j].expert;
      weight[j] = scored[j].score;
    }
    SCORING::template weigh<TOP_K>(weight);
    if constexpr (NORMALISE) {
      float sum = 0;
      for (int j = 0; j < TOP_K; ++j) sum += weight[j];
      for (int j = 0; j < TOP_K; ++j) weight[j] /= sum;
    }
  }
}

// Numbers the slots: expert e has slots [starts[e], starts[e + 1]), in the order of its tokens.
// experts: [rows, TOP_K]. starts: [E + 1]. rows_of: [rows * TOP_K], the token of a slot. slot_of:
// [rows, TOP_K]. Worker 0 does it all.
template <int E, int TOP_K>
void moe_sort(const Worker& worker, const int32_t* experts, int32_t* starts, int32_t* rows_of,
              int32_t* slot_of, int rows) {
  if (worker.id != 0) return;
  const int slots = rows * TOP_K;
  std::fill(starts, starts + E + 1, 0);
  for (int i = 0; i < slots; ++i) ++starts[experts[i] + 1];
  for (int e = 0; e < E; ++e) starts[e + 1] += starts[e];
  int32_t next[E];
  std::copy(starts, starts + E, next);
  for (int i = 0; i < slots; ++i) {
    const int32_t slot = next[experts[i]]++;
    rows_of[slot] = i / TOP_K;
    slot_of[i] = slot;
  }
}

// sorted[slot] = x[rows_of[slot]], of rows of K items. x: [rows, K] with row stride LDX. sorted:
// [slots, K].
template <int K, int LDX>
void moe_gather(const Worker& worker, const float* x, const int32_t* rows_of, float* sorted,
                int slots) {
  const Range range = split(slots, worker);
  for (int64_t slot = range.begin; slot < range.end; ++slot) {
    std::memcpy(sorted + slot * K, x + int64_t(rows_of[slot]) * LDX, K * sizeof(float));
  }
}

// The same of int8 rows, whose K counts four bytes as an item.
template <int K, int LDX>
void moe_gather(const Worker& worker, const uint8_t* x, const int32_t* rows_of, uint8_t* sorted,
                int slots) {
  const Range range = split(slots, worker);
  for (int64_t slot = range.begin; slot < range.end; ++slot) {
    std::memcpy(sorted + slot * K * 4, x + int64_t(rows_of[slot]) * LDX * 4, K * 4);
  }
}

// Deals column tiles, TILES of every expert that has slots, to workers: calls run(expert, tiles,
// start, rows) for those of this one. Each weight is read by one worker, and those of experts
// without slots by none. READING_ROWS: of so many rows' products takes as long as reading the
// weights.
template <int E, int TILES, int READING_ROWS, class RUN>
void deal_experts(const int32_t* starts, const Worker& worker, const RUN& run) {
  const auto work_of = [&](int expert) {  // of a column tile
    const int rows = starts[expert + 1] - starts[expert];
    return rows == 0 ? int64_t(0) : int64_t(rows + READING_ROWS);
  };
  int64_t total = 0, done = 0;
  for (int e = 0; e < E; ++e) total += work_of(e) * TILES;
  // Tiles in order of expert, then column; a tile belongs to the worker in whose share it begins.
  const int64_t begin = total * worker.id / worker.count;
  const int64_t end = total * (worker.id + 1) / worker.count;
  for (int e = 0; e < E && done < end; ++e) {
    const int64_t work = work_of(e);
    if (work == 0) continue;
    const auto first_tile_from = [&](int64_t bound) {
      return int(std::clamp((bound - done + work - 1) / work, int64_t(0), int64_t(TILES)));
    };
    const Range tiles{first_tile_from(begin), first_tile_from(end)};
    done += work * TILES;
    if (tiles.begin >= tiles.end) continue;
    run(int64_t(e), tiles, int64_t(starts[e]), starts[e + 1] - starts[e]);
  }
}

// y[slot] = x[slot] W^T with the weights of the slot's expert. x: [slots, K]. weight: E times packed
// [ceil(N/16)][K][16], zero rows for padding. starts: [E + 1] of moe_sort. y: [slots, N].
template <class W, int E, int N, int K>
void moe_linear(const Worker& worker, const float* x, const W* weight, const int32_t* starts,
                float* y) {
  constexpr int TILES = kChunks<N>;
  deal_experts<E, TILES, kLinearRows>(
      starts, worker, [&](int64_t expert, Range tiles, int64_t start, int rows) {
        const Linear<W, N, K, K, N> shape{x + start * K, weight + expert * TILES * K * kLanes,
                                          nullptr, y + start * N};
        shape.run(tiles, rows);
      });
}

// The same with weights on GRID, one packed matrix after the other. x: rows of Int8Row<K, A>.
template <class GRID, int E, int N, int K, int A>
void moe_int8_linear(const Worker& worker, const uint8_t* x, const uint8_t* weight,
                     const int32_t* starts, float* y) {
  using Shape = Int8Linear<GRID, N, K, A, N>;
  constexpr int TILES = kChunks<N>;
  deal_experts<E, TILES, Int8Tile::DIRECT_ROWS>(
      starts, worker, [&](int64_t expert, Range tiles, int64_t start, int rows) {
        const Shape shape{x + start * Shape::Row::BYTES, weight + expert * TILES * Shape::TILE_BYTES,
                          nullptr, y + start * N};
        shape.run(tiles, rows);
      });
}

// The same with fp32 activations [slots, K].
template <class GRID, int E, int N, int K>
void moe_dequantised_linear(const Worker& worker, const float* x, const uint8_t* weight,
                            const int32_t* starts, float* y) {
  using Shape = DequantisedLinear<GRID, N, K, K, N>;
  constexpr int TILES = kChunks<N>;
  constexpr int64_t MATRIX_BYTES = TILES * GRID::template TILE_BYTES<K>;
  deal_experts<E, TILES, Shape::ROWS>(
      starts, worker, [&](int64_t expert, Range tiles, int64_t start, int rows) {
        const Shape shape{x + start * K, weight + expert * MATRIX_BYTES, nullptr, y + start * N};
        for (int tile = tiles.begin; tile < tiles.end; ++tile) shape.column_tile(tile, rows);
      });
}

// y[t] = sum over j, in order, of weights[t, j] outputs[slot_of[t, j]]. outputs: [slots, N].
// slot_of, weights: [rows, TOP_K]. y: [rows, N] with row stride LDY.
template <int N, int TOP_K, int LDY>
void moe_combine(const Worker& worker, const float* outputs, const int32_t* slot_of,
                 const float* weights, float* y, int rows) {
  const Range units = split(rows * kChunks<N>, worker);
  for (int unit = units.begin; unit < units.end; ++unit) {
    const int64_t row = unit / kChunks<N>;
    const int i = unit % kChunks<N>;
    f32x16 sum = splat(0.0f);
    for (int64_t pair = row * TOP_K; pair < (row + 1) * TOP_K; ++pair) {
      const f32x16 output = load_chunk<N>(outputs + int64_t(slot_of[pair]) * N, i);
      sum = multiply_add(output, splat(weights[pair]), sum);
    }
    store_chunk<N>(y + row * LDY, i, sum);
  }
}

}  // namespace llmbuild
