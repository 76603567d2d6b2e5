// A unit of attention: a few consecutive tokens of one sequence and the query heads of one KV head,
// over one range of keys at a time.
#pragma once

#include "../common/step.h"
#include "key_range.h"

namespace llmbuild {

// What is the same for every query of a call.
struct Scoring {
  float scale;
  int window;
  float soft_cap;
  const float *sinks, *k_scale, *v_scale;

  // The first key that a token sees.
  int first_key(int position) const {
    return window > 0 ? std::max(0, position - window + 1) : 0;
  }
};

// A part of the softmax of some rows: of each its largest score, its weights added up, and its
// weighted values added up, in rows of STRIDE; weights are e^(score - largest).
struct Partial {
  float *largest, *total, *sums;
};

// Query rows are ordered by token, then head. Row arithmetic does not depend on the rows beside it:
// keys that a row doesn't see weigh exactly 0 in it.
template <class KeyItem, class ValueItem, int H, int HKV, int D, int BS, int LDQ, int LDO,
          bool SOFT_CAP, bool SINKS>
class AttentionUnit {
 public:
  static constexpr int GROUP = H / HKV;
  static constexpr int TOKENS = GROUP >= 32 ? 1 : 32 / GROUP;
  static constexpr int STRIDE = kChunks<D> * kLanes;

  explicit AttentionUnit(const Scoring& scoring) : scoring_(scoring) {}

  // Floats of a Partial of this many rows.
  static constexpr int partial_floats(int rows) { return rows * (STRIDE + 2); }
  static Partial partial_at(float* memory, int rows) {
    return {memory + rows * STRIDE, memory + rows * (STRIDE + 1), memory};
  }

  // Takes on the unit's tokens, with no key seen yet. positions: of the tokens. head: the KV head.
  void begin(const int32_t* block_table, const int32_t* positions, int tokens, int head) {
    block_table_ = block_table, positions_ = positions, tokens_ = tokens, head_ = head;
    for (int r = 0; r < tokens * GROUP; ++r) {
      // A sink is a logit that weighs no value.
      largest_[r] = SINKS ? scoring_.sinks[head * GROUP + r % GROUP]
                          : -std::numeric_limits<float>::infinity();
      total_[r] = SINKS ? 1.0f : 0.0f;
    }
    std::memset(sums_, 0, tokens * GROUP * STRIDE * sizeof(float));
  }

  // Takes the unit's queries. q: of its first token and head.
  void set_queries(const float* q) {
    for (int r = 0; r < tokens_ * GROUP; ++r) {
      set_query(r, q + int64_t(r / GROUP) * LDQ + r % GROUP * D);
    }
  }

  // The softmax over the range's keys alone, of all rows that see any of them.
  void attend(const KeyItem* k_pool, const ValueItem* v_pool, int range, Partial to) {
    const int start = range * kRangeKeys;
    const Tokens seeing = tokens_seeing(start);
    const int begin = std::max(start, scoring_.first_key(positions_[seeing.begin]));
    const int end = std::min(start + kRangeKeys, positions_[seeing.end - 1] + 1);
    range_.find(k_pool, v_pool, block_table_, head_, start, begin, end,
                positions_[tokens_ - 1]);
    const int begin_group = (begin - start) / kLanes, end_group = groups_of(end - start);
    const int first_row = seeing.begin * GROUP, end_row = seeing.end * GROUP;
    for_each_run<kTileVectors, 1>(begin_group, end_group, [&](auto count, int group) {
      for_each_run<TILE_ROWS, ROW_UNIT>(first_row, end_row, [&](auto rows, int row) {
        score<rows, count>(row, group);
      });
    });
    for (int r = first_row; r < end_row; ++r) {
      weigh(r, start, begin_group, end_group, to);
    }
    for_each_run<TILE_ROWS, ROW_UNIT>(first_row, end_row, [&](auto rows, int row) {
      // No row of the tile sees keys outside of these.
      const int first = scoring_.first_key(positions_[row / GROUP]);
      const int last = positions_[(row + rows - 1) / GROUP];
      add_values<rows>(row, std::max(begin, first) - start, std::min(end, last + 1) - start, to);
    });
  }

  // Merges a range's softmax into that of the ranges before it.
  // Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
  void absorb(int range, Partial from) {
    const Tokens seeing = tokens_seeing(range * kRangeKeys);
    for (int r = seeing.begin * GROUP; r < seeing.end * GROUP; ++r) {
      const float rise = from.largest[r] - largest_[r];
      const float shrink = exp(splat<NativeF32>(rise > 0 ? -rise : rise))[0];
      float* sums = sums_ + r * STRIDE;
      const float* added = from.sums + r * STRIDE;
      // Two branches with one product each, so that it's plain which the compiler fuses.
      if (rise > 0) {
        largest_[r] = from.largest[r];
        total_[r] = total_[r] * shrink + from.total[r];
        for (int i = 0; i < STRIDE; i += kLanes) {
          store(sums + i, multiply_add(load(sums + i), splat(shrink), load(added + i)));
        }
      } else {
        total_[r] = from.total[r] * shrink + total_[r];
        for (int i = 0; i < STRIDE; i += kLanes) {
          store(sums + i, multiply_add(load(added + i), splat(shrink), load(sums + i)));
        }
      }
    }
  }

  // out: of the unit's first token and head.
  void finish(float* out) const {
    for (int r = 0; r < tokens_ * GROUP; ++r) {
      const f32x16 inverse = splat(1 / total_[r]);
      float* row = out + int64_t(r / GROUP) * LDO + r % GROUP * D;
      for (int c = 0; c < CHUNKS; ++c) {
        store_chunk<D>(row, c, on_channels(scoring_.v_scale, c,
                                           load(sums_ + r * STRIDE + c * kLanes) * inverse));
      }
    }
  }

  // A Partial for the time between attend and absorb.
  Partial own_partial() { return partial_at(partial_, ROWS); }

 private:
  using KeyPool = KVPool<KeyItem, HKV, D, BS>;
  using ValuePool = KVPool<ValueItem, HKV, D, BS>;
  using KeyProduct = Product<KeyItem>;
  using ValueProduct = Product<ValueItem>;
  static constexpr int ROWS = TOKENS * GROUP;
  static constexpr int CHUNKS = kChunks<D>;
  static constexpr int TILE_ROWS = kTileRows<GROUP>;
  static constexpr int ROW_UNIT = std::gcd(TILE_ROWS, GROUP);
  static constexpr int CHUNK_UNIT = std::gcd(kTileVectors, CHUNKS);
  // What meets codes, queries and weights, are integers up to this, times a factor of their row: 15
  // bits, or fewer where a dot product over D would leave 31.
  static constexpr int QUERY_LIMIT =
      std::min(32767, int(0x7fffffff / (kLargestCode<KeyItem> * int64_t(D))));
  static_assert(0x7fffffff / (127 * kRangeKeys) >= 32767);

  struct Tokens {
    int begin, end;
  };

  static int groups_of(int keys) { return (keys + kLanes - 1) / kLanes; }

  // The tokens that see any key of the range that starts at `start`: they follow one another.
  Tokens tokens_seeing(int start) const {
    Tokens tokens{0, tokens_};
    while (positions_[tokens.begin] < start) ++tokens.begin;
    while (scoring_.first_key(positions_[tokens.end - 1]) >= start + kRangeKeys) --tokens.end;
    return tokens;
  }

  // Chunk c of a row of the head, times its channel scales where there are any.
  f32x16 on_channels(const float* scales, int c, f32x16 chunk) const {
    return scales == nullptr ? chunk : chunk * load_chunk<D>(scales + head_ * D, c);
  }

  void set_query(int r, const float* q) {
    typename KeyProduct::Factor* to = queries_ + r * D;
    if constexpr (kIsInteger<KeyItem>) {
      float scaled[D];
      if (scoring_.k_scale != nullptr) {
        for (int c = 0; c < CHUNKS; ++c) {
          store_chunk<D>(scaled, c, on_channels(scoring_.k_scale, c, load_chunk<D>(q, c)));
        }
        q = scaled;
      }
      int16_t rounded[STRIDE];
      query_factors_[r] = round_row<D, QUERY_LIMIT>(q, rounded) * scoring_.scale;
      std::memcpy(to, rounded, D * sizeof(int16_t));
      if constexpr (kHasMinima<KeyItem>) {
        int sum = 0;
        for (int d = 0; d < D; ++d) sum += rounded[d];
        query_sums_[r] = query_factors_[r] * float(sum);
      }
    } else {
      for (int c = 0; c < CHUNKS; ++c) {
        const f32x16 chunk = on_channels(scoring_.k_scale, c, load_chunk<D>(q, c));
        store_chunk<D>(to, c, chunk * splat(scoring_.scale));
      }
    }
  }

  // Scores of a tile's rows with `COUNT` groups of keys, less what the keys' minima add.
  template <int COUNT_ROWS, int COUNT>
  void score(int row, int group) {
    typename KeyProduct::Sums sums[COUNT_ROWS][COUNT];
    LLMBUILD_UNROLL for (int r = 0; r < COUNT_ROWS; ++r) {
      LLMBUILD_UNROLL for (int g = 0; g < COUNT; ++g) sums[r][g] = KeyProduct::zero();
    }
    const KeyItem* items[COUNT];
    const void* ahead[COUNT];
    LLMBUILD_UNROLL for (int g = 0; g < COUNT; ++g) {
      items[g] = range_.keys.items[group + g];
      ahead[g] = range_.ahead_of_keys(group + g);
    }
    multiply_tile<KeyItem, COUNT_ROWS, COUNT>(items, ahead, KeyGroups<KeyPool>::STEP,
                                              queries_ + row * D, D, D / KeyProduct::CELL, sums);
    LLMBUILD_UNROLL for (int r = 0; r < COUNT_ROWS; ++r) {
      float* scores = scores_ + (row + r) * kRangeKeys + group * kLanes;
      LLMBUILD_UNROLL for (int g = 0; g < COUNT; ++g) {
        if constexpr (kIsInteger<KeyItem>) {
          f32x16 factors = splat(query_factors_[row + r]);
          if constexpr (kHasScales<KeyItem>) {
            factors = load(range_.keys.scales[group + g]) * factors;
          }
          store(scores + g * kLanes, to_float(sums[r][g]) * factors);
        } else {
          store(scores + g * kLanes, sums[r][g]);
        }
      }
    }
  }

  // Turns row r's scores of groups [begin_group, end_group) into weights.
  void weigh(int r, int start, int begin_group, int end_group, Partial to) {
    const int position = positions_[r / GROUP];
    const int first = std::max(scoring_.first_key(position) - start, 0);
    const int end = std::min(position + 1 - start, kRangeKeys);
    const int first_group = first / kLanes, last_group = groups_of(end);
    float* scores = scores_ + r * kRangeKeys;
    f32x16 largest = splat(-std::numeric_limits<float>::infinity());
    for (int g = first_group; g < last_group; ++g) {
      f32x16 lanes = load(scores + g * kLanes);
      if constexpr (kHasMinima<KeyItem>) {
        lanes = multiply_add(load(range_.keys.minima[g]), splat(query_sums_[r]), lanes);
      }
      if constexpr (SOFT_CAP) {
        const f32x16 cap = splat(scoring_.soft_cap);
        lanes = cap * tanh(lanes / cap);
      }
      if (g * kLanes < first || end < (g + 1) * kLanes) {
        lanes = keep_lanes(lanes, first - g * kLanes, end - g * kLanes,
                           -std::numeric_limits<float>::infinity());
      }
      store(scores + g * kLanes, lanes);
      largest = maximum(largest, lanes);
    }
    to.largest[r] = lane_maximum(largest);
    const f32x16 shift = splat(to.largest[r]);
    f32x16 total = splat(0.0f), minima_total = splat(0.0f), heaviest = splat(0.0f);
    for (int g = first_group; g < last_group; ++g) {
      // A key that isn't seen has whatever scale and minimum.
      const auto seen = [&](f32x16 lanes) {
        const bool all = first <= g * kLanes && (g + 1) * kLanes <= end;
        return all ? lanes : keep_lanes(lanes, first - g * kLanes, end - g * kLanes, 0.0f);
      };
      f32x16 weights = exp(load(scores + g * kLanes) - shift);
      total = total + weights;
      if constexpr (kHasMinima<ValueItem>) {
        minima_total = multiply_add(weights, seen(load(range_.values.minima[g])), minima_total);
      }
      if constexpr (kHasScales<ValueItem>) {
        weights = seen(weights * load(range_.values.scales[g]));
      }
      if constexpr (kIsInteger<ValueItem>) heaviest = maximum(heaviest, weights);
      store(scores + g * kLanes, weights);
    }
    to.total[r] = lane_sum(total);
    for (int g = begin_group; g < first_group; ++g) store(scores + g * kLanes, splat(0.0f));
    for (int g = last_group; g < end_group; ++g) store(scores + g * kLanes, splat(0.0f));
    if constexpr (kHasMinima<ValueItem>) weighted_minima_[r] = lane_sum(minima_total);
    if constexpr (kIsInteger<ValueItem>) {
      const float limit = lane_maximum(heaviest);
      const f32x16 inverse = splat(limit > 0 ? 32767 / limit : 0.0f);
      for (int g = begin_group; g < end_group; ++g) {
        store_rounded(integer_weights_ + r * kRangeKeys + g * kLanes,
                      load(scores + g * kLanes) * inverse);
      }
      weight_factors_[r] = limit / 32767;
    }
  }

  // Weighted values of a tile's rows, over keys [begin, end) of the range.
  template <int COUNT_ROWS>
  void add_values(int row, int begin, int end, Partial to) {
    for_each_run<kTileVectors, CHUNK_UNIT>(0, CHUNKS, [&](auto chunks, int chunk) {
      add_chunks<COUNT_ROWS, chunks>(row, chunk, begin, end, to);
    });
  }

  template <int COUNT_ROWS, int COUNT>
  void add_chunks(int row, int chunk, int begin, int end, Partial to) {
    using Values = ValueGroups<ValuePool>;
    constexpr int CELL = ValueProduct::CELL;
    typename ValueProduct::Sums sums[COUNT_ROWS][COUNT];
    LLMBUILD_UNROLL for (int r = 0; r < COUNT_ROWS; ++r) {
      LLMBUILD_UNROLL for (int c = 0; c < COUNT; ++c) sums[r][c] = ValueProduct::zero();
    }
    for (int g = begin / kLanes; g * kLanes < end; ++g) {
      const int first = std::max(begin - g * kLanes, 0) / CELL;
      const int last = (std::min(end - g * kLanes, kLanes) + CELL - 1) / CELL;
      const ValueItem* items[COUNT];
      const void* ahead[COUNT];
      LLMBUILD_UNROLL for (int c = 0; c < COUNT; ++c) {
        const int item =
            first * Values::STEP + (chunk + c) * kLanes * CELL / kElements<ValueItem>;
        items[c] = range_.values.items[g] + item;
        ahead[c] = static_cast<const ValueItem*>(range_.ahead_of_values(g)) + item;
      }
      multiply_tile<ValueItem, COUNT_ROWS, COUNT>(
          items, ahead, Values::STEP, weights() + row * kRangeKeys + g * kLanes + first * CELL,
          kRangeKeys, last - first, sums);
    }
    LLMBUILD_UNROLL for (int r = 0; r < COUNT_ROWS; ++r) {
      float* row_sums = to.sums + (row + r) * STRIDE + chunk * kLanes;
      LLMBUILD_UNROLL for (int c = 0; c < COUNT; ++c) {
        const int at = row + r;
        if constexpr (kHasMinima<ValueItem>) {
          store(row_sums + c * kLanes, multiply_add(to_float(sums[r][c]), splat(weight_factors_[at]),
                                                    splat(weighted_minima_[at])));
        } else if constexpr (kIsInteger<ValueItem>) {
          store(row_sums + c * kLanes, to_float(sums[r][c]) * splat(weight_factors_[at]));
        } else {
          store(row_sums + c * kLanes, sums[r][c]);
        }
      }
    }
  }

  const typename ValueProduct::Factor* weights() const {
    if constexpr (kIsInteger<ValueItem>) {
      return integer_weights_;
    } else {
      return scores_;
    }
  }

  const Scoring scoring_;
  const int32_t *block_table_, *positions_;
  int tokens_, head_;
  KeyRange<KeyPool, ValuePool> range_;
  alignas(64) typename KeyProduct::Factor queries_[ROWS * D];
  alignas(64) float scores_[ROWS * kRangeKeys];  // scores first, then weights
  alignas(64) int16_t integer_weights_[kIsInteger<ValueItem> ? ROWS * kRangeKeys : 1];
  alignas(64) float sums_[ROWS * STRIDE];
  alignas(64) float partial_[partial_floats(ROWS)];
  float largest_[ROWS], total_[ROWS];
  // Where a row's queries or weights are integers: what they are multiplied with.
  float query_factors_[ROWS], weight_factors_[ROWS];
  // Where elements have minima: what a row's keys and values add for each unit of them, and in all.
  float query_sums_[ROWS], weighted_minima_[ROWS];
};

}  // namespace llmbuild
