// y = act(gate) * up, the elementwise middle of a gated MLP; as fp32 or, for a quantised linear, as
// int8 rows.
#pragma once

#include <algorithm>

#include "../common/activation.h"
#include "../common/dtype.h"
#include "../common/int8_rows.h"
#include "../common/team.h"

namespace llmbuild {

// ACT: a type of common/activation.h. gate, up, y: [rows, N] with row strides LDG, LDU, LDY; y may
// be gate or up.
template <int N, int LDG, int LDU, int LDY, class ACT>
void gated_activation(const Worker& worker, const float* gate, const float* up, float* y,
                      int rows) {
  const Range units = split(rows * kChunks<N>, worker);
  for (int unit = units.begin; unit < units.end; ++unit) {
    const int64_t row = unit / kChunks<N>;
    const int i = unit % kChunks<N>;
    const f32x16 activated = ACT::apply(load_chunk<N>(gate + row * LDG, i));
    store_chunk<N>(y + row * LDY, i, activated * load_chunk<N>(up + row * LDU, i));
  }
}

// The same with y as int8 rows, A columns to a scale; STATIC: of scales[N / A].
template <int N, int LDG, int LDU, int A, class ACT, bool STATIC = false>
void gated_activation_int8(const Worker& worker, const float* gate, const float* up, uint8_t* y,
                           int rows, const float* scales = nullptr) {
  constexpr int GROUPS = N / A;
  // Groups that are activated, then rounded: alternating between the two waits for either.
  constexpr int BATCH = std::max(1, 512 / A);
  const Range units = split(rows * GROUPS, worker);
  for (int unit = units.begin, count; unit < units.end; unit += count) {
    const int64_t row = unit / GROUPS;
    const int group = unit % GROUPS;
    count = std::min({BATCH, GROUPS - group, units.end - unit});
    const float *g = gate + row * LDG + group * A, *u = up + row * LDU + group * A;
    alignas(64) float activated[BATCH * A];
    for (int i = 0; i < count * A; i += kLanes) {
      store(activated + i, ACT::apply(load(g + i)) * load(u + i));
    }
    for (int i = 0; i < count; ++i) {
      quantise_group<N, A, STATIC>(activated + i * A, group + i, y + row * Int8Row<N, A>::BYTES,
                                   scales);
    }
  }
}

}  // namespace llmbuild
