// How a layer's K and V pools lie in memory, for the kernel that writes and the one that reads.
//
// A pool is [blocks][HKV] slabs, and a slab holds BS tokens of one KV head, every item of it a KV:
// - K as columns: tokens in groups of KEYS = gcd(BS, 16), a group [D / CELL][KEYS][CELL]. So
//   sixteen scores are made from whole vectors, with no transposition.
// - V as rows: [BS / PAIR][D][PAIR].
// - Of int8, the BS scales (fp32) follow the codes, at the next multiple of four bytes. CELL is 2
//   there, and PAIR too where BS is even: neighbours that a product of pairs sums (pair_dot.h).
#pragma once

#include <numeric>

#include "dtype.h"
#include "int8_rows.h"
#include "step.h"

namespace llmbuild {

template <class KV>
constexpr bool kIsQuantised = std::is_same_v<KV, int8_t>;

template <class KV, int HKV, int D, int BS>
struct KVPool {
  static_assert(D % 2 == 0);
  static constexpr int KEYS = std::gcd(BS, kLanes);
  static constexpr int CELL = kIsQuantised<KV> ? 2 : 1;
  static constexpr int PAIR = kIsQuantised<KV> && BS % 2 == 0 ? 2 : 1;
  static constexpr int64_t CODE_BYTES = int64_t(BS) * D * sizeof(KV);
  static constexpr int64_t SCALES_AT = (CODE_BYTES + 3) / 4 * 4;
  static constexpr int64_t SLAB_BYTES = kIsQuantised<KV> ? SCALES_AT + 4 * BS : CODE_BYTES;

  // The slab of a position's block and a KV head.
  template <class Item>
  static Item* slab(Item* pool, const int32_t* block_table, int position, int head) {
    return pool + (int64_t(block_table[position / BS]) * HKV + head) * (SLAB_BYTES / sizeof(KV));
  }

  // Where element d of the token at `offset` in its block lies in a slab, in items.
  static constexpr int key_item(int offset, int d) {
    return ((offset / KEYS * (D / CELL) + d / CELL) * KEYS + offset % KEYS) * CELL + d % CELL;
  }
  static constexpr int value_item(int offset, int d) {
    return (offset / PAIR * D + d) * PAIR + offset % PAIR;
  }

  // Put a token's row of D items, and the scale that int8 has, at its offset.
  static void put_key(KV* slab, int offset, const KV* row, float scale) {
    KV* to = slab + key_item(offset, 0);
    for (int d = 0; d < D; d += CELL) std::memcpy(to + d * KEYS, row + d, CELL * sizeof(KV));
    if constexpr (kIsQuantised<KV>) scales(slab)[offset] = scale;
  }
  static void put_value(KV* slab, int offset, const KV* row, float scale) {
    KV* to = slab + value_item(offset, 0);
    for (int d = 0; d < D; ++d) to[d * PAIR] = row[d];
    if constexpr (kIsQuantised<KV>) scales(slab)[offset] = scale;
  }

  // The scales of an int8 slab.
  static float* scales(int8_t* slab) { return reinterpret_cast<float*>(slab + SCALES_AT); }
  static const float* scales(const int8_t* slab) {
    return reinterpret_cast<const float*>(slab + SCALES_AT);
  }
};

// Stores the lanes, rounded to the nearest integers (ties to even), as T, which must hold them.
template <class T, class V>
LLMBUILD_INLINE void store_rounded(T* to, V lanes) {
  if constexpr (IsPair<V>::value) {
    store_rounded(to, lanes.lo);
    store_rounded(to + sizeof(lanes.lo) / sizeof(float), lanes.hi);
  } else {
    typedef T Narrow __attribute__((vector_size(kNativeLanes * sizeof(T))));
    const Narrow narrow = __builtin_convertvector(round_to_int(lanes), Narrow);
    std::memcpy(to, &narrow, sizeof(narrow));
  }
}

// A row x[D] as integers up to LIMIT, padded with zeros to whole chunks, and the factor (returned)
// that they are multiplied with: integer = x * (LIMIT / largest magnitude), rounded to nearest,
// ties to even; factor = largest / LIMIT. The integers are 0 where LIMIT / largest isn't finite:
// for a row of zeros, and one with an infinity or NaN, which the factor passes on.
template <int D, int LIMIT, class T>
LLMBUILD_INLINE float round_row(const float* x, T* to) {
  constexpr int STRIDE = kChunks<D> * kLanes;
  alignas(64) float padded[STRIDE];
  for (int c = 0; c < kChunks<D>; ++c) store(padded + c * kLanes, load_chunk<D>(x, c));
  const float largest = largest_magnitude<STRIDE>(padded), inverse = LIMIT / largest;
  const bool finite = inverse <= std::numeric_limits<float>::max();
  const f32x16 factor = splat(finite ? inverse : 0.0f);
  for (int i = 0; i < STRIDE; i += kLanes) store_rounded(to + i, load(padded + i) * factor);
  return largest / LIMIT;
}

}  // namespace llmbuild
