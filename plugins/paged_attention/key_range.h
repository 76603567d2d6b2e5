// The keys and values of one range of positions, in groups of sixteen.
#pragma once

#include <algorithm>

#include "../common/kv_pool.h"
#include "product.h"

namespace llmbuild {

// Keys whose softmax is one piece; pieces are merged in ascending order. Ranges and groups are
// counted from position 0, so they are the same for every step that reads them.
constexpr int kRangeKeys = 128;
constexpr int kRangeGroups = kRangeKeys / kLanes;

// Lanes [first, end) of x, `other` in the rest.
template <class V>
LLMBUILD_INLINE V keep_lanes(V x, int first, int end, float other) {
  if constexpr (IsPair<V>::value) {
    constexpr int HALF = sizeof(x.lo) / sizeof(float);
    return {keep_lanes(x.lo, first, end, other),
            keep_lanes(x.hi, first - HALF, end - HALF, other)};
  } else {
    NativeI32 lane;
    for (int i = 0; i < kNativeLanes; ++i) lane[i] = i;
    const NativeI32 kept = (lane >= first) & (lane < end);
    return kept ? x : splat<V>(other);
  }
}

// Read in place where a group is whole in a block, otherwise copied into that form.
template <class KV, int HKV, int D, int BS>
class KeyRange {
 public:
  using Pool = KVPool<KV, HKV, D, BS>;
  static constexpr int CELL = Product<KV>::CELL;
  static constexpr int STRIDE = kChunks<D> * kLanes;
  static constexpr bool KEYS_IN_PLACE = BS % kLanes == 0;
  static constexpr bool VALUES_IN_PLACE = BS % kLanes == 0 && D % kLanes == 0;
  static constexpr int KEY_STEP = kLanes * CELL;  // items from one cell of D to the next
  static constexpr int VALUE_STEP = STRIDE * CELL;  // items from one cell of keys to the next

  // Of group g: D / CELL vectors of keys; 16 / CELL rows of values, padded to whole chunks; the
  // scales of the sixteen if the pool is int8.
  const KV* keys[kRangeGroups];
  const KV* values[kRangeGroups];
  const float* key_scales[kRangeGroups];
  const float* value_scales[kRangeGroups];

  // Finds positions [begin, end) of the range that starts at `start`; groups that hold none of
  // them stay as they are. What lies outside [begin, end) in a group's lanes is arbitrary.
  // last: the last position that will be asked for, to look ahead.
  void find(const KV* k_pool, const KV* v_pool, const int32_t* block_table, int head, int start,
            int begin, int end, int last) {
    begin_group_ = (begin - start) / kLanes, end_group_ = (end - start + kLanes - 1) / kLanes;
    for (int g = begin_group_; g < end_group_; ++g) {
      const int first = start + g * kLanes;
      if constexpr (KEYS_IN_PLACE) {
        const int offset = first % BS;
        const KV* k_slab = Pool::slab(k_pool, block_table, first, head);
        const KV* v_slab = Pool::slab(v_pool, block_table, first, head);
        keys[g] = k_slab + Pool::key_item(offset, 0);
        values[g] = v_slab + Pool::value_item(offset, 0);
        if constexpr (kIsQuantised<KV>) {
          key_scales[g] = Pool::scales(k_slab) + offset;
          value_scales[g] = Pool::scales(v_slab) + offset;
          __builtin_prefetch(key_scales[g]);
          __builtin_prefetch(value_scales[g]);
        }
      } else {
        keys[g] = copied_keys_ + g * D * kLanes;
        copy_keys(k_pool, block_table, head, first, begin, end, copied_keys_ + g * D * kLanes);
        if constexpr (kIsQuantised<KV>) {
          key_scales[g] = copied_scales_[0][g];
          value_scales[g] = copied_scales_[1][g];
          copy_scales(k_pool, block_table, head, first, begin, end, copied_scales_[0][g]);
          copy_scales(v_pool, block_table, head, first, begin, end, copied_scales_[1][g]);
        }
      }
      if constexpr (!VALUES_IN_PLACE) {
        values[g] = copied_values_ + g * STRIDE * kLanes;
        copy_values(v_pool, block_table, head, first, begin, end,
                    copied_values_ + g * STRIDE * kLanes);
      }
    }
    for (int i = 0; i < kTileVectors; ++i) {
      const int position = start + kRangeKeys + i * kLanes;
      const bool exists = IN_PLACE && position <= last;
      next_keys_[i] = exists ? Pool::slab(k_pool, block_table, position, head) +
                                   Pool::key_item(position % BS, 0)
                             : keys[end_group_ - 1];
    }
  }

  // What is read after the group's keys or values, about a tile later.
  const KV* ahead_of_keys(int group) const {
    if (!IN_PLACE) return keys[group];
    const int next = group + kTileVectors;
    return next < end_group_ ? keys[next]
                             : values[std::min(begin_group_ + next - end_group_, end_group_ - 1)];
  }
  const KV* ahead_of_values(int group) const {
    if (!IN_PLACE) return values[group];
    const int next = group + kTileVectors;
    return next < end_group_ ? values[next] : next_keys_[next - end_group_];
  }

 private:
  static constexpr bool IN_PLACE = KEYS_IN_PLACE && VALUES_IN_PLACE;

  static void copy_keys(const KV* pool, const int32_t* block_table, int head, int first, int begin,
                        int end, KV* to) {
    constexpr int RUN = Pool::KEYS * CELL;
    for (int j = 0; j < kLanes; j += Pool::KEYS) {
      const int position = std::clamp(first + j, begin, end - 1) / Pool::KEYS * Pool::KEYS;
      const KV* from = Pool::slab(pool, block_table, position, head) +
                       Pool::key_item(position % BS, 0);
      for (int d = 0; d < D / CELL; ++d) {
        std::memcpy(to + (d * kLanes + j) * CELL, from + d * RUN, RUN * sizeof(KV));
      }
    }
  }

  static void copy_values(const KV* pool, const int32_t* block_table, int head, int first,
                          int begin, int end, KV* to) {
    for (int position = std::max(first, begin); position < std::min(first + kLanes, end);
         ++position) {
      const KV* slab = Pool::slab(pool, block_table, position, head);
      const int j = position - first;
      for (int d = 0; d < D; ++d) {
        to[(j / CELL * STRIDE + d) * CELL + j % CELL] = slab[Pool::value_item(position % BS, d)];
      }
    }
  }

  static void copy_scales(const KV* pool, const int32_t* block_table, int head, int first,
                          int begin, int end, float* to) {
    store(to, splat(0.0f));
    for (int position = std::max(first, begin); position < std::min(first + kLanes, end);
         ++position) {
      const KV* slab = Pool::slab(pool, block_table, position, head);
      to[position - first] = Pool::scales(slab)[position % BS];
    }
  }

  int begin_group_, end_group_;
  const KV* next_keys_[kTileVectors];
  // Zero at first: rows' padding and keys that were never written count as numbers.
  KV copied_keys_[KEYS_IN_PLACE ? 1 : kRangeGroups * D * kLanes] = {};
  alignas(64) float copied_scales_[2][kRangeGroups][kLanes];
  KV copied_values_[VALUES_IN_PLACE ? 1 : kRangeGroups * STRIDE * kLanes] = {};
};

}  // namespace llmbuild
