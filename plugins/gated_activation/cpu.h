// y = act(gate) * up, the elementwise middle of a gated MLP.
#pragma once

#include "../common/activation.h"
#include "../common/dtype.h"
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

}  // namespace llmbuild
