// QK-norm, rotary embedding, and the write of new keys and values to their pool slots.
#pragma once

#include "../common/dtype.h"
#include "../common/step.h"
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

// For every token: heads of q rotated into q_out, heads of k rotated into k_pool, heads of v copied
// into v_pool. q: [T, H, D] with row stride LDQ; k, v: [T, HKV, D] with row strides LDK, LDV.
// table: [T, ROT] of rope_table, null when ROT is 0 (nothing turns). q_norm, k_norm: [D], unused
// unless QK_NORM. q_out: [T, H, D]. k_pool, v_pool: [blocks, HKV, BS, D]; a token's slot follows
// from its sequence's block table.
template <class KV, int H, int HKV, int D, int BS, int LDQ, int LDK, int LDV, int LDO, bool QK_NORM,
          int ROT = D>
void rope_kv_write(const Worker& worker, const Step& step, const float* q, const float* k,
                   const float* v, const float* table, const float* q_norm, const float* k_norm,
                   float eps, KV* k_pool, KV* v_pool, float* q_out) {
  static_assert(H % HKV == 0 && 0 <= ROT && ROT <= D && ROT % 2 == 0);
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
    const float* value = v + token * LDV + head * D;
    sequence = step.sequence_of(int(token), sequence);
    const int64_t slot =
        pool_row<HKV, BS>(step.block_table(sequence), step.positions[token], head) * D;
    for (int d = 0; d < D; ++d) k_pool[slot + d] = from_float<KV>(key[d]);
    for (int d = 0; d < D; ++d) v_pool[slot + d] = from_float<KV>(value[d]);
  }
}

}  // namespace llmbuild
