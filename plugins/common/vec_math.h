// Elementary functions of sixteen lanes beyond exp (vec.h), each within a few ulp.
#pragma once

#include "vec.h"

namespace llmbuild {

template <class V>
LLMBUILD_INLINE V absolute(V x) {
  if constexpr (IsPair<V>::value) {
    return {absolute(x.lo), absolute(x.hi)};
  } else {
    return (V)((NativeI32)x & 0x7fffffff);
  }
}

// Lanes of `magnitude`, none negative, with the signs of `sign`.
LLMBUILD_INLINE NativeF32 with_sign(NativeF32 magnitude, NativeF32 sign) {
  return (NativeF32)((NativeI32)magnitude | ((NativeI32)sign & int32_t(0x80000000)));
}

// Sum of coefficients[i] x^i.
template <int N>
LLMBUILD_INLINE NativeF32 polynomial(const float (&coefficients)[N], NativeF32 x) {
  NativeF32 sum = splat<NativeF32>(coefficients[N - 1]);
  LLMBUILD_UNROLL for (int i = N - 2; i >= 0; --i) {
    sum = multiply_add(sum, x, splat<NativeF32>(coefficients[i]));
  }
  return sum;
}

// 1 / (1 + e^-x); 0 where that is below the smallest normal.
template <class V>
LLMBUILD_INLINE V sigmoid(V x) {
  const V one = splat<V>(1.0f);
  return one / (one + exp(splat<V>(0.0f) - x));
}

// Of |x|, and the sign put back. Up to 0.625, x + x^3 P(x^2) with a minimax P (error 4e-9); above,
// 1 - 2 / (e^2x + 1), where the difference cancels nothing.
LLMBUILD_INLINE NativeF32 tanh(NativeF32 x) {
  constexpr float kSmall[] = {-0.3333328393f, 0.1333149129f, -0.05374349786f, 0.02065058607f,
                              -0.005717043352f};
  const NativeF32 one = splat<NativeF32>(1.0f), two = splat<NativeF32>(2.0f);
  const NativeF32 magnitude = absolute(x), square = x * x;
  const NativeF32 small = multiply_add(magnitude * square, polynomial(kSmall, square), magnitude);
  const NativeF32 large = one - two / (exp(two * magnitude) + one);
  return with_sign(magnitude <= splat<NativeF32>(0.625f) ? small : large, x);
}
template <class V>
LLMBUILD_INLINE Pair<V> tanh(Pair<V> x) {
  return {tanh(x.lo), tanh(x.hi)};
}

// Of |x|, and the sign put back. Up to 1, x + x P(x^2); above, 1 - e^Q(x) with Q near ln erfc, cut
// off at 4, where erf rounds to 1. P and Q are minimax (errors of the result 1.2e-9 and 1.0e-9).
LLMBUILD_INLINE NativeF32 erf(NativeF32 x) {
  constexpr float kSmall[] = {0.1283791659f,    -0.3761262714f,  0.1128360018f,
                              -0.02685444486f,  0.005189535819f, -0.0008020845283f,
                              7.88913209e-5f};
  constexpr float kLogErfc[] = {-0.0003537268421f, -1.127040004f,  -0.6382257343f,
                                -0.1030373159f,    0.02180529133f, -0.002939600097f,
                                0.000185573223f};
  const NativeF32 one = splat<NativeF32>(1.0f), four = splat<NativeF32>(4.0f);
  const NativeF32 magnitude = absolute(x);
  const NativeF32 capped = magnitude > four ? four : magnitude;
  const NativeF32 small = multiply_add(magnitude, polynomial(kSmall, x * x), magnitude);
  const NativeF32 large = one - exp(polynomial(kLogErfc, capped));
  return with_sign(magnitude <= one ? small : large, x);
}
template <class V>
LLMBUILD_INLINE Pair<V> erf(Pair<V> x) {
  return {erf(x.lo), erf(x.hi)};
}

}  // namespace llmbuild
