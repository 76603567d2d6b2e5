// Cosines and sines of the rotary embedding for the tokens of a step.
#pragma once

#include <cmath>
#include <cstdint>

#include "../common/team.h"

namespace llmbuild {

// table[t, 0:HALF] = cos(p f) scale, table[t, HALF:2 HALF] = sin(p f) scale, with p = positions[t]
// and f = inv_freq[i]; the angle is the fp32 product, as in the reference. positions: [rows].
// inv_freq: [HALF]. table: [rows, 2 HALF].
template <int HALF>
void rope_table(const Worker& worker, const int32_t* positions, const float* inv_freq, float scale,
                float* table, int rows) {
  const Range units = split(rows * HALF, worker);
  for (int unit = units.begin; unit < units.end; ++unit) {
    const int row = unit / HALF, i = unit % HALF;
    const float angle = float(positions[row]) * inv_freq[i];
    float* entry = table + int64_t(row) * 2 * HALF + i;
    entry[0] = std::cos(angle) * scale;
    entry[HALF] = std::sin(angle) * scale;
  }
}

}  // namespace llmbuild
