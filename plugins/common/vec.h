// Sixteen fp32 lanes, the unit in which every CPU kernel computes.
//
// f32x16 is one hardware vector with AVX-512 and a tree of narrower ones elsewhere, so the same
// kernel source keeps its values in registers at every ISA level. Sums over lanes follow one fixed
// tree, whatever the hardware width. (Differences between ISA levels come from FMA alone.)
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LLMBUILD_INLINE inline __attribute__((always_inline))
#define LLMBUILD_UNROLL _Pragma("GCC unroll 32")

namespace llmbuild {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kNativeLanes = 16;
#elif defined(__AVX__)
constexpr int kNativeLanes = 8;
#else
constexpr int kNativeLanes = 4;
#endif

// Vector registers of the target, counted in f32x16: what a register tile may use.
#if defined(__AVX512F__)
constexpr int kVectorRegisters = 32;
#elif defined(__aarch64__)
constexpr int kVectorRegisters = 32 * kNativeLanes / kLanes;
#else
constexpr int kVectorRegisters = 16 * kNativeLanes / kLanes;
#endif

typedef float f32x4 __attribute__((vector_size(16)));
typedef float NativeF32 __attribute__((vector_size(4 * kNativeLanes)));
typedef int32_t NativeI32 __attribute__((vector_size(4 * kNativeLanes)));

// Two vectors used as one of twice the width.
template <class V>
struct Pair {
  V lo, hi;
};

template <class V>
struct IsPair : std::false_type {};
template <class V>
struct IsPair<Pair<V>> : std::true_type {};

template <int LANES>
struct VectorOf {
  using type = Pair<typename VectorOf<LANES / 2>::type>;
};
template <>
struct VectorOf<kNativeLanes> {
  using type = NativeF32;
};
using f32x16 = VectorOf<kLanes>::type;

template <class V>
LLMBUILD_INLINE Pair<V> operator+(Pair<V> a, Pair<V> b) {
  return {a.lo + b.lo, a.hi + b.hi};
}
template <class V>
LLMBUILD_INLINE Pair<V> operator-(Pair<V> a, Pair<V> b) {
  return {a.lo - b.lo, a.hi - b.hi};
}
template <class V>
LLMBUILD_INLINE Pair<V> operator*(Pair<V> a, Pair<V> b) {
  return {a.lo * b.lo, a.hi * b.hi};
}
template <class V>
LLMBUILD_INLINE Pair<V> operator/(Pair<V> a, Pair<V> b) {
  return {a.lo / b.lo, a.hi / b.hi};
}

// Every lane = value. (Subtracting zero keeps the sign of -0; adding it would not.)
template <class V = f32x16>
LLMBUILD_INLINE V splat(float value) {
  if constexpr (IsPair<V>::value) {
    const auto half = splat<decltype(V::lo)>(value);
    return {half, half};
  } else {
    return value - V{};
  }
}

// a * b + c, one rounding where the target has FMA (-ffp-contract=fast).
template <class V>
LLMBUILD_INLINE V multiply_add(V a, V b, V c) {
  if constexpr (IsPair<V>::value) {
    return {multiply_add(a.lo, b.lo, c.lo), multiply_add(a.hi, b.hi, c.hi)};
  } else {
    return a * b + c;
  }
}

// Lane-wise maximum; b where a lane of either is NaN.
template <class V>
LLMBUILD_INLINE V maximum(V a, V b) {
  if constexpr (IsPair<V>::value) {
    return {maximum(a.lo, b.lo), maximum(a.hi, b.hi)};
  } else {
    return a > b ? a : b;
  }
}

// Unaligned load of as many floats as V has lanes.
template <class V = f32x16>
LLMBUILD_INLINE V load(const float* from) {
  if constexpr (IsPair<V>::value) {
    using Half = decltype(V::lo);
    return {load<Half>(from), load<Half>(from + sizeof(Half) / sizeof(float))};
  } else {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
  }
}

template <class V>
LLMBUILD_INLINE void store(float* to, V value) {
  if constexpr (IsPair<V>::value) {
    store(to, value.lo);
    store(to + sizeof(value.lo) / sizeof(float), value.hi);
  } else {
    std::memcpy(to, &value, sizeof(V));
  }
}

// Stores the first `count` lanes, 0 <= count <= 16.
LLMBUILD_INLINE void store_first(float* to, f32x16 value, int count) {
  float lanes[kLanes];
  store(lanes, value);
  for (int i = 0; i < count; ++i) to[i] = lanes[i];
}

// The two halves of a vector wider than four lanes.
template <class V>
LLMBUILD_INLINE auto halves(V v) {
  if constexpr (IsPair<V>::value) {
    return v;
  } else if constexpr (sizeof(V) == 64) {
    typedef float Half __attribute__((vector_size(32)));
    return Pair<Half>{__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                      __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15)};
  } else {
    static_assert(sizeof(V) == 32);
    return Pair<f32x4>{__builtin_shufflevector(v, v, 0, 1, 2, 3),
                       __builtin_shufflevector(v, v, 4, 5, 6, 7)};
  }
}

template <class V>
LLMBUILD_INLINE float front(V v) {
  if constexpr (IsPair<V>::value) {
    return front(v.lo);
  } else {
    return v[0];
  }
}

// Sum of all lanes, as a balanced tree: lane i with i + n/2 at every level.
template <class V>
LLMBUILD_INLINE float lane_sum(V v) {
  if constexpr (sizeof(V) == sizeof(f32x4)) {
    return (v[0] + v[2]) + (v[1] + v[3]);
  } else {
    const auto pair = halves(v);
    return lane_sum(pair.lo + pair.hi);
  }
}

template <class V>
LLMBUILD_INLINE float lane_maximum(V v) {
  if constexpr (sizeof(V) == sizeof(f32x4)) {
    const f32x4 pairs = maximum(v, f32x4(__builtin_shufflevector(v, v, 2, 3, 0, 1)));
    return maximum(pairs, f32x4(__builtin_shufflevector(pairs, pairs, 1, 0, 3, 2)))[0];
  } else {
    const auto pair = halves(v);
    return lane_maximum(maximum(pair.lo, pair.hi));
  }
}

// p 2^n, for 1/2 <= p < 2 and whole n from -151 to 129; rounded once where it is subnormal.
LLMBUILD_INLINE NativeF32 scale_by_power(NativeF32 p, NativeF32 n) {
#if defined(__AVX512F__)
  return (NativeF32)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  const NativeI32 exponent = __builtin_convertvector(n, NativeI32), half = exponent >> 1;
  return p * (NativeF32)((half + 127) << 23) * (NativeF32)((exponent - half + 127) << 23);
#endif
}

// e^x within 2 ulp; 0 below -104 (and for -inf), +inf above 89, NaN for NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2 (Cody-Waite), and e^r by its Taylor polynomial of degree 7
// (its remainder is below 2^-27 there).
LLMBUILD_INLINE NativeF32 exp(NativeF32 x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const auto constant = [](float value) __attribute__((always_inline)) {
    return splat<NativeF32>(value);
  };
  x = x < constant(-104.0f) ? constant(-104.0f) : x;
  x = x > constant(89.0f) ? constant(89.0f) : x;
  const NativeF32 shifted = multiply_add(x, constant(1.44269504f), constant(kShift));
  const NativeF32 n = shifted - constant(kShift);
  NativeF32 r = multiply_add(n, constant(-0.693359375f), x);
  r = multiply_add(n, constant(2.12194440e-4f), r);
  NativeF32 p = constant(1.0f / 5040);
  p = multiply_add(p, r, constant(1.0f / 720));
  p = multiply_add(p, r, constant(1.0f / 120));
  p = multiply_add(p, r, constant(1.0f / 24));
  p = multiply_add(p, r, constant(1.0f / 6));
  p = multiply_add(p, r, constant(0.5f));
  p = multiply_add(p * r, r, r) + constant(1.0f);
  return scale_by_power(p, n);
}
template <class V>
LLMBUILD_INLINE Pair<V> exp(Pair<V> x) {
  return {exp(x.lo), exp(x.hi)};
}

}  // namespace llmbuild
