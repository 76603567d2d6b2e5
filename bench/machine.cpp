// What a machine can do: reads, multiply-adds and barriers on a team of threads. Every function
// returns seconds for one call on all threads; the operations of a call are counted in machine.py.
#include "common/dot.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace llmbuild;

namespace {

constexpr int kAccumulators = kVectorRegisters >= 32 ? 20 : kVectorRegisters >= 8 ? 5 : 2;
constexpr int kDotAccumulators = kVectorRegisters >= 32 ? 16 : kVectorRegisters >= 8 ? 4 : 2;
constexpr int kSteps = 10000;

// Takes a value, so that what made it can't be left out.
template <class V>
LLMBUILD_INLINE void keep(V value) {
  asm volatile("" : : "m"(value));
}

// Sums `count` floats. `ahead`: how many floats before their use they are asked for, 0 for never;
// what the hardware prefetches of its own accord is not always all that memory can give.
void read(const float* from, int64_t count, int64_t ahead) {
  f32x16 sums[8];
  for (f32x16& sum : sums) sum = splat(0.0f);
  for (int64_t i = 0; i + 8 * kLanes <= count; i += 8 * kLanes) {
    LLMBUILD_UNROLL for (int j = 0; j < 8; ++j) {
      if (ahead > 0) __builtin_prefetch(from + i + j * kLanes + ahead, 0, 2);
      sums[j] = sums[j] + load(from + i + j * kLanes);
    }
  }
  LLMBUILD_UNROLL for (const f32x16& sum : sums) keep(sum);
}

void multiply_add_fp32() {
  f32x16 sums[kAccumulators];
  const f32x16 factor = splat(0.5f), term = splat(1.0f);
  for (int j = 0; j < kAccumulators; ++j) sums[j] = splat(float(j));
  for (int i = 0; i < kSteps; ++i) {
    LLMBUILD_UNROLL for (f32x16& sum : sums) sum = multiply_add(sum, factor, term);
  }
  LLMBUILD_UNROLL for (const f32x16& sum : sums) keep(sum);
}

// Makes the compiler believe that the value changes.
LLMBUILD_INLINE void refresh(NativeI32& value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
}

// What the linears of this ISA level do, from registers: unsigned codes of 4 bits times int8.
void dot_int8() {
  Dots<4> dots[kDotAccumulators];
  const i32x16 codes = repeat(NativeI32{} + 0x01010101);
  NativeI32 x = NativeI32{} + 0x01010101;
  for (int j = 0; j < kDotAccumulators; ++j) dots[j] = Dots<4>::from(repeat(NativeI32{}));
  for (int i = 0; i < kSteps; ++i) {
    LLMBUILD_UNROLL for (int j = 0; j < kDotAccumulators; ++j) {
      refresh(x);
      dots[j].add(Dots<4>::codes(codes), x);
    }
  }
  LLMBUILD_UNROLL for (Dots<4>& dot : dots) {
    dot.end_block();
    keep(dot.total);
  }
}

#if defined(__x86_64__)

constexpr int kBf16Accumulators = 16;

__attribute__((target("avx512f,avx512bf16"))) void dot_bf16() {
  __m512 sums[kBf16Accumulators] = {};
  const __m512bh factor = (__m512bh)_mm512_set1_epi32(0x3c003c00);
  for (int i = 0; i < kSteps; ++i) {
    LLMBUILD_UNROLL for (int j = 0; j < kBf16Accumulators; ++j) {
      sums[j] = _mm512_dpbf16_ps(sums[j], factor, factor);
      asm("" : "+v"(sums[j]));
    }
  }
  LLMBUILD_UNROLL for (const __m512& sum : sums) keep(sum);
}

const bool kHasBf16 = __builtin_cpu_supports("avx512bf16");

#else

constexpr int kBf16Accumulators = 0;
void dot_bf16() {}
constexpr bool kHasBf16 = false;

#endif

}  // namespace

// Reads `bytes` of `buffer` `passes` times; each thread has its own part of them.
LLMBUILD_EXPORT double read_seconds(int threads, int64_t calls, const float* buffer, int64_t bytes,
                                    int passes, int64_t ahead) {
  const int64_t share = bytes / 4 / threads;
  return seconds_per_call(threads, 0, calls, [&](const Worker& worker, int64_t) {
    for (int pass = 0; pass < passes; ++pass) read(buffer + worker.id * share, share, ahead);
  });
}

LLMBUILD_EXPORT double barrier_seconds(int threads, int64_t calls) {
  return seconds_per_call(threads, 0, calls, [](const Worker&, int64_t) {});
}

// Operations of one thread's call: additions and multiplications.
LLMBUILD_EXPORT int64_t fp32_operations() { return 2 * kLanes * kAccumulators * kSteps; }
LLMBUILD_EXPORT double fp32_seconds(int threads, int64_t calls) {
  return seconds_per_call(threads, 0, calls, [](const Worker&, int64_t) { multiply_add_fp32(); });
}

// 0 operations: this processor or this target has no such instruction.
LLMBUILD_EXPORT int64_t bf16_operations() {
  return kHasBf16 ? 2 * 32 * kBf16Accumulators * kSteps : 0;
}
LLMBUILD_EXPORT double bf16_seconds(int threads, int64_t calls) {
  return seconds_per_call(threads, 0, calls, [](const Worker&, int64_t) { dot_bf16(); });
}

LLMBUILD_EXPORT int64_t int8_operations() { return 2 * 64 * kDotAccumulators * kSteps; }
LLMBUILD_EXPORT double int8_seconds(int threads, int64_t calls) {
  return seconds_per_call(threads, 0, calls, [](const Worker&, int64_t) { dot_int8(); });
}
