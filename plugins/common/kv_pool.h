// How a layer's K and V pools lie in memory, for the kernel that writes and the one that reads.
//
// A pool is [blocks][HKV] slabs, and a slab holds BS tokens of one KV head. Its items are of one
// type, which K's and V's pools need not share:
// - float and bf16: an element each.
// - int8_t: a code, and element = scale * code. int8_static: a code, and no scale in the pool.
// - int4x2: the codes of two elements, and element = minimum + scale * code.
// The order of elements:
// - K as columns: tokens in groups of KEYS = gcd(BS, 16), a group [D / CELL][KEYS][CELL]. So
//   sixteen scores are made from whole vectors, with no transposition.
// - V as rows: [BS / PAIR][D][PAIR].
// - CELL is 2 for codes, and PAIR too where BS is even: neighbours that a product of pairs sums
//   (pair_dot.h). An item of int4 is such a pair, but where BS is odd, two neighbours of D in V.
// - At the next multiple of four bytes follow the BS scales, of int8 (fp32) and int4 (bf16), and
//   of int4 the BS minima (bf16).
#pragma once

#include <numeric>

#include "kv_row.h"
#include "step.h"

namespace llmbuild {

// Of a token in one head: the type of its scale and its minimum.
template <class Item>
using RangeItem = std::conditional_t<kHasMinima<Item>, bf16, float>;

// Copies element `from_index` of items to element `to_index` of others.
template <class Item>
LLMBUILD_INLINE void copy_element(Item* to, int to_index, const Item* from, int from_index) {
  if constexpr (kElements<Item> == 2) {
    const int code = from[from_index / 2].codes >> from_index % 2 * 4 & 15;
    const int shift = to_index % 2 * 4;
    uint8_t& codes = to[to_index / 2].codes;
    codes = uint8_t((codes & 0xf0 >> shift) | code << shift);
  } else {
    to[to_index] = from[from_index];
  }
}

template <class ItemType, int HKV, int D, int BS>
struct KVPool {
  static_assert(D % 2 == 0);
  using Item = ItemType;
  using Row = KVRow<Item, D>;
  using Range = RangeItem<Item>;
  static constexpr int HEAD_DIM = D;
  static constexpr int BLOCK_SIZE = BS;
  static constexpr int KEYS = std::gcd(BS, kLanes);
  static constexpr int CELL = kIsInteger<Item> ? 2 : 1;
  static constexpr int PAIR = kIsInteger<Item> && BS % 2 == 0 ? 2 : 1;
  static constexpr int64_t ITEM_BYTES = int64_t(BS) * D / kElements<Item> * sizeof(Item);
  static constexpr int64_t RANGES_AT = (ITEM_BYTES + 3) / 4 * 4;
  static constexpr int64_t SLAB_BYTES =
      RANGES_AT + BS * sizeof(Range) * (kHasScales<Item> + kHasMinima<Item>);
  // Whether two tokens of V share an item.
  static constexpr bool SHARES_ITEMS = kElements<Item> == 2 && PAIR == 2;

  // The slab of a position's block and a KV head.
  template <class T>
  static T* slab(T* pool, const int32_t* block_table, int position, int head) {
    return pool + (int64_t(block_table[position / BS]) * HKV + head) * (SLAB_BYTES / sizeof(Item));
  }

  // Where element d of the token at `offset` in its block lies in a slab, in elements.
  static constexpr int key_element(int offset, int d) {
    return ((offset / KEYS * (D / CELL) + d / CELL) * KEYS + offset % KEYS) * CELL + d % CELL;
  }
  static constexpr int value_element(int offset, int d) {
    return (offset / PAIR * D + d) * PAIR + offset % PAIR;
  }

  // Put a token's row at its offset.
  static void put_key(Item* slab, int offset, const Row& row) {
    Item* to = slab + key_element(offset, 0) / kElements<Item>;
    for (int d = 0; d < D; d += CELL) {
      if constexpr (kElements<Item> == 2) {
        to[d / 2 * KEYS] = both(row, d);
      } else {
        std::memcpy(to + d * KEYS, row.elements + d, CELL * sizeof(Item));
      }
    }
    put_range(slab, offset, row.range);
  }
  static void put_value(Item* slab, int offset, const Row& row) {
    if constexpr (SHARES_ITEMS) {
      Item* to = slab + value_element(offset, 0) / 2;
      const int shift = offset % 2 * 4, others = 0xf0 >> shift;
      for (int d = 0; d < D; ++d) {
        to[d].codes = uint8_t((to[d].codes & others) | row.elements[d] << shift);
      }
    } else if constexpr (kElements<Item> == 2) {
      Item* to = slab + value_element(offset, 0) / 2;
      for (int d = 0; d < D; d += 2) to[d / 2] = both(row, d);
    } else {
      Item* to = slab + value_element(offset, 0);
      for (int d = 0; d < D; ++d) std::memcpy(to + d * PAIR, row.elements + d, sizeof(Item));
    }
    put_range(slab, offset, row.range);
  }

  // The scales and minima of a slab.
  static const Range* scales(const Item* slab) {
    return reinterpret_cast<const Range*>(reinterpret_cast<const uint8_t*>(slab) + RANGES_AT);
  }
  static const Range* minima(const Item* slab) { return scales(slab) + BS; }

 private:
  static Item both(const Row& row, int d) {
    return {uint8_t(row.elements[d] | row.elements[d + 1] << 4)};
  }

  static void put_range(Item* slab, int offset, CodeRange range) {
    Range* scales = reinterpret_cast<Range*>(reinterpret_cast<uint8_t*>(slab) + RANGES_AT);
    if constexpr (kHasScales<Item>) scales[offset] = from_float<Range>(range.scale);
    if constexpr (kHasMinima<Item>) scales[BS + offset] = from_float<Range>(range.minimum);
  }
};

}  // namespace llmbuild
