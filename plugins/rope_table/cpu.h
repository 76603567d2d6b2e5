// Cosines and sines of the rotary embedding for the tokens of a step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../common/step.h"
#include "../common/team.h"

namespace llmbuild {

// Entry i of a row: cos(p f) scale, and HALF later sin(p f) scale, with p the position and f the
// frequency; the angle is the fp32 product, as in the reference.
template <int HALF>
inline void write_angle(int position, float frequency, float scale, float* entry) {
  const float angle = float(position) * frequency;
  entry[0] = std::cos(angle) * scale;
  entry[HALF] = std::sin(angle) * scale;
}

// table[t, 0:HALF] = cos(p f) scale, table[t, HALF:2 HALF] = sin(p f) scale, with p = positions[t]
// and f = inv_freq[i]. positions: [rows]. inv_freq: [HALF]. table: [rows, 2 HALF].
template <int HALF>
void rope_table(const Worker& worker, const int32_t* positions, const float* inv_freq, float scale,
                float* table, int rows) {
  const Range units = split(rows * HALF, worker);
  for (int unit = units.begin; unit < units.end; ++unit) {
    const int row = unit / HALF, i = unit % HALF;
    write_angle<HALF>(positions[row], inv_freq[i], scale, table + int64_t(row) * 2 * HALF + i);
  }
}

// A table whose frequencies follow from the length of the token's sequence: frequencies(length)
// gives a pointer to HALF of them, valid until its next call.
template <int HALF, class Frequencies>
inline void rope_table_by_length(const Worker& worker, const Step& step, float scale, float* table,
                                 Frequencies frequencies) {
  const Range units = split(step.num_tokens * HALF, worker);
  int sequence = -1;
  const float* inv_freq = nullptr;
  for (int unit = units.begin; unit < units.end; ++unit) {
    const int token = unit / HALF, i = unit % HALF;
    const int owner = step.sequence_of(token, sequence < 0 ? 0 : sequence);
    if (owner != sequence) inv_freq = frequencies(step.kv_lengths[owner]);
    sequence = owner;
    float* entry = table + int64_t(token) * 2 * HALF + i;
    write_angle<HALF>(step.positions[token], inv_freq[i], scale, entry);
  }
}

// Longrope: tokens of a sequence longer than switch_length (after the step) take the second row of
// inv_freq [2][HALF], others the first. table: [T, 2 HALF], as of rope_table.
template <int HALF>
void switched_rope_table(const Worker& worker, const Step& step, const float* inv_freq,
                         int switch_length, float scale, float* table) {
  rope_table_by_length<HALF>(worker, step, scale, table, [&](int length) {
    return length > switch_length ? inv_freq + HALF : inv_freq;
  });
}

// Dynamic NTK: the base grows with the length of the sequence (after the step) once that exceeds
// original_length. With L the greater of the two and d = 2 HALF: base = theta (factor L /
// original_length - factor + 1)^(d / (d - 2)), inv_freq[i] = base^(-2i / d). table: [T, 2 HALF].
template <int HALF>
void dynamic_rope_table(const Worker& worker, const Step& step, float theta, float factor,
                        int original_length, float scale, float* table) {
  static_assert(HALF > 1);
  float inv_freq[HALF];
  rope_table_by_length<HALF>(worker, step, scale, table, [&](int length) {
    const double relative = double(std::max(length, original_length)) / original_length;
    const double stretch = factor * relative - (double(factor) - 1);
    const double base = theta * std::pow(stretch, HALF / (HALF - 1.0));
    for (int i = 0; i < HALF; ++i) inv_freq[i] = float(std::pow(base, -double(i) / HALF));
    return static_cast<const float*>(inv_freq);
  });
}

}  // namespace llmbuild
