// Activation functions as types, for kernels that take one as a template argument.
#pragma once

#include "vec_math.h"

namespace llmbuild {

// x / (1 + e^-x)
struct Silu {
  static LLMBUILD_INLINE f32x16 apply(f32x16 x) {
    const f32x16 one = splat(1.0f);
    return x / (one + exp(splat(0.0f) - x));
  }
};

// x (1 + erf(x / sqrt 2)) / 2
struct Gelu {
  static LLMBUILD_INLINE f32x16 apply(f32x16 x) {
    return splat(0.5f) * x * (splat(1.0f) + erf(x * splat(0.707106781f)));
  }
};

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
struct GeluTanh {
  static LLMBUILD_INLINE f32x16 apply(f32x16 x) {
    const f32x16 inner = x + splat(0.044715f) * x * x * x;
    return splat(0.5f) * x * (splat(1.0f) + tanh(splat(0.797884561f) * inner));
  }
};

struct Relu {
  static LLMBUILD_INLINE f32x16 apply(f32x16 x) { return maximum(splat(0.0f), x); }  // keeps NaN
};

// relu(x)^2
struct Relu2 {
  static LLMBUILD_INLINE f32x16 apply(f32x16 x) {
    const f32x16 positive = Relu::apply(x);
    return positive * positive;
  }
};

struct Sigmoid {
  static LLMBUILD_INLINE f32x16 apply(f32x16 x) { return sigmoid(x); }
};

struct Tanh {
  static LLMBUILD_INLINE f32x16 apply(f32x16 x) { return tanh(x); }
};

}  // namespace llmbuild
