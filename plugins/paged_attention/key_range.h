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

// The scales and minima of sixteen tokens a group, where a pool has them.
template <class Pool>
class GroupRanges {
 public:
  using Range = typename Pool::Range;
  static constexpr bool IN_PLACE = Pool::BLOCK_SIZE % kLanes == 0;

  const Range* scales[kRangeGroups];
  const Range* minima[kRangeGroups];

  // Finds those of group g, which begins at position `first`, of positions [begin, end).
  void find_ranges(const typename Pool::Item* pool, const int32_t* block_table, int head, int g,
                   int first, int begin, int end) {
    if constexpr (!kHasScales<typename Pool::Item>) return;
    if constexpr (IN_PLACE) {
      const auto* slab = Pool::slab(pool, block_table, first, head);
      scales[g] = Pool::scales(slab) + first % Pool::BLOCK_SIZE;
      minima[g] = Pool::minima(slab) + first % Pool::BLOCK_SIZE;
      __builtin_prefetch(scales[g]);
      if constexpr (kHasMinima<typename Pool::Item>) __builtin_prefetch(minima[g]);
    } else {
      scales[g] = copied_[0][g];
      minima[g] = copied_[1][g];
      std::memset(copied_[0][g], 0, sizeof(copied_[0][g]));
      std::memset(copied_[1][g], 0, sizeof(copied_[1][g]));
      for (int position = std::max(first, begin); position < std::min(first + kLanes, end);
           ++position) {
        const auto* slab = Pool::slab(pool, block_table, position, head);
        const int offset = position % Pool::BLOCK_SIZE;
        copied_[0][g][position - first] = Pool::scales(slab)[offset];
        if constexpr (kHasMinima<typename Pool::Item>) {
          copied_[1][g][position - first] = Pool::minima(slab)[offset];
        }
      }
    }
  }

 private:
  Range copied_[2][IN_PLACE ? 1 : kRangeGroups][kLanes];
};

// Keys in groups: items[g] are D / CELL vectors of sixteen lanes, each a cell.
template <class Pool>
class KeyGroups : public GroupRanges<Pool> {
 public:
  using Item = typename Pool::Item;
  static constexpr int D = Pool::HEAD_DIM;
  static constexpr int CELL_ITEMS = Product<Item>::CELL / kElements<Item>;
  static constexpr int STEP = kLanes * CELL_ITEMS;  // items from one cell of D to the next
  static constexpr bool IN_PLACE = Pool::BLOCK_SIZE % kLanes == 0;

  const Item* items[kRangeGroups];

  void find(const Item* pool, const int32_t* block_table, int head, int g, int first, int begin,
            int end) {
    this->find_ranges(pool, block_table, head, g, first, begin, end);
    if constexpr (IN_PLACE) {
      items[g] = in_place(pool, block_table, head, first);
    } else {
      Item* to = copied_ + g * GROUP_ITEMS;
      items[g] = to;
      for (int j = 0; j < kLanes; j += Pool::KEYS) {
        const int position = std::clamp(first + j, begin, end - 1) / Pool::KEYS * Pool::KEYS;
        const Item* from = in_place(pool, block_table, head, position);
        constexpr int RUN = Pool::KEYS * CELL_ITEMS;
        for (int d = 0; d < D / Product<Item>::CELL; ++d) {
          std::memcpy(to + d * STEP + j * CELL_ITEMS, from + d * RUN, RUN * sizeof(Item));
        }
      }
    }
  }

  // Where the keys that begin at a position lie in their slab.
  static const Item* in_place(const Item* pool, const int32_t* block_table, int head,
                              int position) {
    return Pool::slab(pool, block_table, position, head) +
           Pool::key_element(position % Pool::BLOCK_SIZE, 0) / kElements<Item>;
  }

 private:
  static constexpr int GROUP_ITEMS = D * kLanes / kElements<Item>;
  // Zero at first: keys that were never written count as numbers.
  Item copied_[IN_PLACE ? 1 : kRangeGroups * GROUP_ITEMS] = {};
};

// Values in groups: items[g] are 16 / CELL rows of cells, padded to whole chunks.
template <class Pool>
class ValueGroups : public GroupRanges<Pool> {
 public:
  using Item = typename Pool::Item;
  static constexpr int D = Pool::HEAD_DIM;
  static constexpr int CELL = Product<Item>::CELL;
  static constexpr int STRIDE = kChunks<D> * kLanes;
  static constexpr int STEP = STRIDE * CELL / kElements<Item>;  // items from one row to the next
  static constexpr bool IN_PLACE = Pool::BLOCK_SIZE % kLanes == 0 && D % kLanes == 0;

  const Item* items[kRangeGroups];

  void find(const Item* pool, const int32_t* block_table, int head, int g, int first, int begin,
            int end) {
    this->find_ranges(pool, block_table, head, g, first, begin, end);
    if constexpr (IN_PLACE) {
      items[g] = Pool::slab(pool, block_table, first, head) +
                 Pool::value_element(first % Pool::BLOCK_SIZE, 0) / kElements<Item>;
    } else {
      Item* to = copied_ + g * GROUP_ITEMS;
      items[g] = to;
      for (int position = std::max(first, begin); position < std::min(first + kLanes, end);
           ++position) {
        const Item* slab = Pool::slab(pool, block_table, position, head);
        const int j = position - first, offset = position % Pool::BLOCK_SIZE;
        for (int d = 0; d < D; ++d) {
          const int element = (j / CELL * STRIDE + d) * CELL + j % CELL;
          copy_element(to, element, slab, Pool::value_element(offset, d));
        }
      }
    }
  }

 private:
  static constexpr int GROUP_ITEMS = STRIDE * kLanes / kElements<Item>;
  // Zero at first: rows' padding and values that were never written count as numbers.
  Item copied_[IN_PLACE ? 1 : kRangeGroups * GROUP_ITEMS] = {};
};

// Both, read in place where a group is whole in a block, otherwise copied into that form. What
// lies outside the positions asked for in a group's lanes is arbitrary.
template <class KeyPool, class ValuePool>
class KeyRange {
 public:
  using KeyItem = typename KeyPool::Item;
  using ValueItem = typename ValuePool::Item;

  KeyGroups<KeyPool> keys;
  ValueGroups<ValuePool> values;

  // Finds positions [begin, end) of the range that starts at `start`; groups that hold none of
  // them stay as they are. last: the last position that will be asked for, to look ahead.
  void find(const KeyItem* k_pool, const ValueItem* v_pool, const int32_t* block_table, int head,
            int start, int begin, int end, int last) {
    begin_group_ = (begin - start) / kLanes, end_group_ = (end - start + kLanes - 1) / kLanes;
    for (int g = begin_group_; g < end_group_; ++g) {
      const int first = start + g * kLanes;
      keys.find(k_pool, block_table, head, g, first, begin, end);
      values.find(v_pool, block_table, head, g, first, begin, end);
    }
    for (int i = 0; i < kTileVectors; ++i) {
      const int position = start + kRangeKeys + i * kLanes;
      const bool exists = IN_PLACE && position <= last;
      next_keys_[i] = exists ? keys.in_place(k_pool, block_table, head, position)
                             : keys.items[end_group_ - 1];
    }
  }

  // What is read after the group's keys or values, about a tile later.
  const void* ahead_of_keys(int group) const {
    if (!IN_PLACE) return keys.items[group];
    const int next = group + kTileVectors;
    if (next < end_group_) return keys.items[next];
    return values.items[std::min(begin_group_ + next - end_group_, end_group_ - 1)];
  }
  const void* ahead_of_values(int group) const {
    if (!IN_PLACE) return values.items[group];
    const int next = group + kTileVectors;
    if (next < end_group_) return values.items[next];
    return next_keys_[next - end_group_];
  }

 private:
  static constexpr bool IN_PLACE = ValueGroups<ValuePool>::IN_PLACE;

  int begin_group_, end_group_;
  const KeyItem* next_keys_[kTileVectors];
};

}  // namespace llmbuild
