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

// y[D] = x[D] / the channel scales of a head, or x where there are none.
template <int D>
inline const float* divide_channels(const float* x, const float* scales, int head, float* y) {
  if (scales == nullptr) return x;
  for (int c = 0; c < kChunks<D>; ++c) {
    store_chunk<D>(y, c, load_chunk<D>(x, c) / load_chunk<D>(scales + head * D, c));
  }
  return y;
}

// For every token: heads of q rotated into q_out, heads of k rotated into k_pool, heads of v copied
// into v_pool. q: [T, H, D] with row stride LDQ; k, v: [T, HKV, D] with row strides LDK, LDV.
// table: [T, ROT] of rope_table, null when ROT is 0 (nothing turns). q_norm, k_norm: [D], unused
// unless QK_NORM. q_out: [T, H, D]. k_pool, v_pool: as kv_pool.h says, of KeyItem and ValueItem; a
// token's slot follows from its sequence's block table. k_scale, v_scale: [HKV, D] that keys (once
// rotated) and values are divided by, null for none.
template <class KeyItem, class ValueItem, int H, int HKV, int D, int BS, int LDQ, int LDK, int LDV,
          int LDO, bool QK_NORM, int ROT = D>
void rope_kv_write(const Worker& worker, const Step& step, const float* q, const float* k,
                   const float* v, const float* table, const float* q_norm, const float* k_norm,
                   float eps, KeyItem* k_pool, ValueItem* v_pool, float* q_out,
                   const float* k_scale = nullptr, const float* v_scale = nullptr) {
  static_assert(H % HKV == 0 && 0 <= ROT && ROT <= D && ROT % 2 == 0);
  using Keys = KVPool<KeyItem, HKV, D, BS>;
  using Values = KVPool<ValueItem, HKV, D, BS>;
  constexpr int GROUP = H / HKV;
  const Range units = split(step.num_tokens * HKV, worker);
  int sequence = 0;
  for (int unit = units.begin; unit < units.end; ++unit) {
    const int token = unit / HKV, head = unit % HKV;
    const float* angles = table + int64_t(token) * ROT;
    for (int h = head * GROUP; h < (head + 1) * GROUP; ++h) {
      rotate_head<D, QK_NORM, ROT>(q + int64_t(token) * LDQ + h * D, q_norm, eps, angles,
                                   q_out + int64_t(token) * LDO + h * D);
    }
    float key[D], divided[D];
    rotate_head<D, QK_NORM, ROT>(k + int64_t(token) * LDK + head * D, k_norm, eps, angles, key);
    sequence = step.sequence_of(token, sequence);
    const int32_t* block_table = step.block_table(sequence);
    const int position = step.positions[token], offset = position % BS;
    Keys::put_key(Keys::slab(k_pool, block_table, position, head), offset,
                  typename Keys::Row(divide_channels<D>(key, k_scale, head, divided)));
    ValueItem* v_slab = Values::slab(v_pool, block_table, position, head);
    const auto put_value = [&](int token, int offset) {
      const float* value = v + int64_t(token) * LDV + head * D;
      Values::put_value(v_slab, offset,
                        typename Values::Row(divide_channels<D>(value, v_scale, head, divided)));
    };
    if constexpr (Values::SHARES_ITEMS) {  // both of a pair are written with its first of the step
      const bool is_second = offset % 2 == 1 && token > step.query_start[sequence];
      if (is_second) continue;
      if (offset % 2 == 0 && token + 1 < step.query_start[sequence + 1]) {
        put_value(token + 1, offset + 1);
      }
    }
    put_value(token, offset);
  }
}

}  // namespace llmbuild
