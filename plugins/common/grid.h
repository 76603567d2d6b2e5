// Quantised weights as the kernels read them: tiles of 16 rows, in each the groups of columns in
// order. Of a group: code bytes, 16 fp16 scales, and 16 fp16 minima or zero points if it has such.
#pragma once

#include "dot.h"
#include "dtype.h"

namespace llmbuild {

// Weights of BITS bits, 4 or 8, GROUP neighbouring columns with one scale. Symmetric:
// w = scale * (code - ZERO); asymmetric: w = scale * code + minimum, or with ZERO_POINTS, which are
// whole numbers from 0 to 255, w = scale * (code - zero).
template <int BITS_, int GROUP_, bool ASYMMETRIC_, bool ZERO_POINTS_ = false>
struct Grid {
  static constexpr int BITS = BITS_, GROUP = GROUP_;
  static constexpr bool ASYMMETRIC = ASYMMETRIC_, ZERO_POINTS = ZERO_POINTS_;
  static constexpr bool MINIMA = ASYMMETRIC && !ZERO_POINTS;
  static_assert(ASYMMETRIC || !ZERO_POINTS, "a symmetric grid has one zero for all groups");
  static constexpr int BLOCK = 32;  // columns; a group is a multiple of it
  static_assert(BITS == 4 || BITS == 8);
  static_assert(GROUP % BLOCK == 0, "a group must be a multiple of 32 columns");

  static constexpr int ZERO = 1 << (BITS - 1);
  // 64 bytes, four of each row. Of 4 bits: columns 0-3 low and 4-7 high in the four bytes.
  static constexpr int VECTOR_COLUMNS = 32 / BITS;
  static constexpr int CODE_BYTES = GROUP / VECTOR_COLUMNS * 64;
  static constexpr int GROUP_BYTES = CODE_BYTES + (ASYMMETRIC ? 64 : 32);
  template <int K>
  static constexpr int TILE_BYTES = K / GROUP * GROUP_BYTES;

  static LLMBUILD_INLINE const fp16* scales(const uint8_t* group) {
    return reinterpret_cast<const fp16*>(group + CODE_BYTES);
  }
  // An asymmetric group's minima, or its zero points.
  static LLMBUILD_INLINE const fp16* offsets(const uint8_t* group) { return scales(group) + kLanes; }

  // What code 0 stands for in an asymmetric group. Exact: zero points have at most 8 bits.
  static LLMBUILD_INLINE f32x16 minima(const uint8_t* group) {
    const f32x16 offset = load(offsets(group));
    return ZERO_POINTS ? (splat(0.0f) - offset) * load(scales(group)) : offset;
  }

  // Columns [column, column + BLOCK) of the group at `group`, as [BLOCK][16].
  static LLMBUILD_INLINE void dequantise_block(const uint8_t* group, int column, float* to) {
    const f32x16 scale = load(scales(group));
    const f32x16 offset = ASYMMETRIC ? load(offsets(group)) : splat(float(ZERO));
    for (int k = column; k < column + BLOCK; k += VECTOR_COLUMNS) {
      const i32x16 words = load_words(group + k / VECTOR_COLUMNS * 64);
      LLMBUILD_UNROLL for (int j = 0; j < VECTOR_COLUMNS; ++j, to += kLanes) {
        const int shift = 8 * (j % 4) + 4 * (j / 4);
        const i32x16 codes = each_native(
            [&](NativeI32 v) __attribute__((always_inline)) {
              return v >> shift & ((1 << BITS) - 1);
            },
            words);
        const f32x16 code = to_float(codes);
        // Exact but for the one rounding of the sum.
        store(to, MINIMA ? multiply_add(code, scale, offset) : (code - offset) * scale);
      }
    }
  }

  // A whole group of one of the tile's 16 rows.
  static LLMBUILD_INLINE void dequantise_row(const uint8_t* group, int lane, float* to) {
    const float scale = to_float(scales(group)[lane]);
    const float offset = ASYMMETRIC ? to_float(offsets(group)[lane]) : float(ZERO);
    const uint8_t* bytes = group + 4 * lane;
    for (int k = 0; k < GROUP; k += VECTOR_COLUMNS, bytes += 64) {
      LLMBUILD_UNROLL for (int j = 0; j < VECTOR_COLUMNS; ++j) {
        const float code = float(bytes[j % 4] >> 4 * (j / 4) & ((1 << BITS) - 1));
        to[k + j] = MINIMA ? scale * code + offset : scale * (code - offset);
      }
    }
  }
};

}  // namespace llmbuild
