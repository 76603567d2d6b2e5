// Times work on a pinned team of threads.
#pragma once

#include <chrono>

#include "common/team.h"

#define LLMBUILD_EXPORT extern "C" __attribute__((visibility("default")))

namespace llmbuild {

// Seconds of one call(worker, i), i from `first` on, with the barrier that ends it. The first call
// warms up and isn't counted. The calling thread is pinned meanwhile.
template <class F>
double seconds_per_call(int threads, int64_t first, int64_t calls, F call) {
  struct Run {
    F& call;
    int64_t first, calls;
    double seconds;
  } run{call, first, calls, 0};
  Team team(threads, true);
  team.run(
      [](const Worker& worker, void* argument) {
        Run& run = *static_cast<Run*>(argument);
        run.call(worker, run.first);
        worker.barrier();
        const auto start = std::chrono::steady_clock::now();
        for (int64_t i = 1; i <= run.calls; ++i) {
          run.call(worker, run.first + i);
          worker.barrier();
        }
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        if (worker.id == 0) run.seconds = elapsed.count() / double(run.calls);
      },
      &run);
  return run.seconds;
}

}  // namespace llmbuild
