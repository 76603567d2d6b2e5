// Copies to memory that another processor reads next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vec.h"

// Past the caches where the target can, but for ThreadSanitizer, which doesn't see such stores.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define LLMBUILD_STREAMS 1
#include <immintrin.h>
#else
#define LLMBUILD_STREAMS 0
#endif

namespace llmbuild {

// store() to an aligned address.
template <class V>
LLMBUILD_INLINE void stream(float* to, V value) {
#if LLMBUILD_STREAMS
  if constexpr (IsPair<V>::value) {
    stream(to, value.lo);
    stream(to + sizeof(value.lo) / sizeof(float), value.hi);
  } else if constexpr (sizeof(V) == 64) {
    _mm512_stream_ps(to, value);
  } else if constexpr (sizeof(V) == 32) {
    _mm256_stream_ps(to, value);
  } else {
    _mm_stream_ps(to, value);
  }
#else
  store(to, value);
#endif
}

// memcpy to memory that another processor has read, and will read again. An ordinary store to such a
// line waits until that one has given it up, and the stores after it wait with it: between two cores
// of an EPYC (AVX-512) that took ten times as long. A release store may follow.
inline void stream_copy(void* to, const void* from, int64_t bytes) {
  constexpr int64_t kLine = sizeof(float) * kLanes;
  uint8_t* const out = static_cast<uint8_t*>(to);
  const uint8_t* const in = static_cast<const uint8_t*>(from);
  int64_t i = std::min<int64_t>(bytes, -reinterpret_cast<uintptr_t>(to) % kLine);
  std::memcpy(out, in, i);
  for (; i + kLine <= bytes; i += kLine) {
    stream(reinterpret_cast<float*>(out + i), load(reinterpret_cast<const float*>(in + i)));
  }
  std::memcpy(out + i, in + i, bytes - i);
#if LLMBUILD_STREAMS
  _mm_sfence();  // such stores aren't ordered by a release
#endif
}

}  // namespace llmbuild
