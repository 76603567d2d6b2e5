// QK-norm, rotary embedding, and the write of new keys and values to their pool slots.
#pragma once

#include "../common/kv_pool.h"
#include "../common/team.h"
#include "../rms_norm/cpu.h"

namespace llmbuild {

// Rotates the halves of x[0:ROT] by table[ROT] (ROT/2 cosines, then ROT/2 sines), after RMSNorm of
// x[D] with `norm` when QK_NORM. With h = ROT/2: y[i] = x[i] cos[i] - x[i + h] sin[i], y[i + h] =
// x[i + h] cos[i] + x[i] sin[i]. The rest of x stays as it is.
template <int D, bool QK_NORM, int ROT>
inline void rotate_head(const float* x, const float* norm, float eps, const float* table,
                        float* y) {
  constexpr int HALF = ROT / 2;
  float normed[D];
  if constexpr (QK_NORM) {
    rms_norm_row<D>(x, norm, eps, normed);
    x = normed;
  }
  for (int i = 0; i < kChunks<HALF>; ++i) {
    const f32x16 first = load_chunk<HALF>(x, i), second = load_chunk<HALF>(x + HALF, i);
    const f32x16 cosine = load_chunk<HALF>(table, i), sine = load_chunk<HALF>(table + HALF, i);
    store_chunk<HALF>(y, i, first * cosine - second * sine);
    store_chunk<HALF>(y + HALF, i, second * cosine + first * sine);
  }
  if constexpr (ROT < D) std::memcpy(y + ROT, x + ROT, (D - ROT) * sizeof(float));
}

// A head's x[D] as items of its slab: quantised, and the scale is returned, or converted.
template <int D, class KV>
inline float to_items(const float* x, KV* items) {
  if constexpr (kIsQuantised<KV>) {
    return round_row<D, 127>(x, items);
  } else {
    for (int d = 0; d < D; ++d) items[d] = from_float<KV>(x[d]);
    return 1;
  }
}

// For every token: heads of q rotated into q_out, heads of k rotated into k_pool, heads of v copied
// into v_pool. q: [T, H, D] with row stride LDQ; k, v: [T, HKV, D] with row strides LDK, LDV.
// table: [T, ROT] of rope_table, null when ROT is 0 (nothing turns). q_norm, k_norm: [D], unused
// unless QK_NORM. q_out: [T, H, D]. k_pool, v_pool: as kv_pool.h says, of float, bf16 or int8; a
// token's slot follows from its sequence's block table.
template <class KV, int H, int HKV, int D, int BS, int LDQ, int LDK, int LDV, int LDO, bool QK_NORM,
          int ROT = D>
void rope_kv_write(const Worker& worker, const Step& step, const float* q, const float* k,
                   const float* v, const float* table, const float* q_norm, const float* k_norm,
                   float eps, KV* k_pool, KV* v_pool, float* q_out) {
  static_assert(H % HKV == 0 && 0 <= ROT && ROT <= D && ROT % 2 == 0);
  using Pool = KVPool<KV, HKV, D, BS>;
  constexpr int GROUP = H / HKV;
  const Range units = split(step.num_tokens * HKV, worker);
  int sequence = 0;
  for (int unit = units.begin; unit < units.end; ++unit) {
    const int64_t token = unit / HKV;
    const int head = unit % HKV;
    const float* angles = table + token * ROT;
    for (int h = head * GROUP; h < (head + 1) * GROUP; ++h) {
      rotate_head<D, QK_NORM, ROT>(q + token * LDQ + h * D, q_norm, eps, angles,
                                   q_out + token * LDO + h * D);
    }
    float key[D];
    rotate_head<D, QK_NORM, ROT>(k + token * LDK + head * D, k_norm, eps, angles, key);
    sequence = step.sequence_of(int(token), sequence);
    const int32_t* block_table = step.block_table(sequence);
    const int position = step.positions[token], offset = position % BS;
    KV* k_slab = Pool::slab(k_pool, block_table, position, head);
    KV* v_slab = Pool::slab(v_pool, block_table, position, head);
    KV items[kChunks<D> * kLanes];
    const float k_scale = to_items<D>(key, items);
    Pool::put_key(k_slab, offset, items, k_scale);
    const float v_scale = to_items<D>(v + token * LDV + head * D, items);
    Pool::put_value(v_slab, offset, items, v_scale);
  }
}

}  // namespace llmbuild
