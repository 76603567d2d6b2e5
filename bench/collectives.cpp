// Times what ranks do together, and the copies that bound it. collectives.py puts timed.h before.
#include <cstring>

#include "all_reduce/cpu.h"
#include "common/make_ranks.h"

using namespace llmbuild;

// This rank's part in `calls` sums of x, after as many / 8 that warm up; how long each took goes to
// `seconds`. All of them together, or -1 if a rank has failed.
LLMBUILD_EXPORT double all_reduce_seconds(const RanksConfig* config, int threads, float* x,
                                          int64_t count, int64_t calls, double* seconds) {
  using Clock = std::chrono::steady_clock;
  struct Run {
    Ranks& ranks;
    float* x;
    int64_t count, calls;
    double* seconds;
  };
  const auto ranks = make_ranks(*config, count);
  Run run{*ranks, x, count, calls, seconds};
  Team team(threads, true);
  team.run(
      [](const Worker& worker, void* argument) {
        Run& run = *static_cast<Run*>(argument);
        for (int64_t call = -run.calls / 8; call < run.calls; ++call) {
          const Clock::time_point start = Clock::now();
          all_reduce<1>(worker, run.ranks, run.x, int(run.count));
          worker.barrier();
          const std::chrono::duration<double> elapsed = Clock::now() - start;
          if (worker.id == 0 && call >= 0) run.seconds[call] = elapsed.count();
        }
      },
      &run);
  double total = 0;
  for (int64_t call = 0; call < calls; ++call) total += seconds[call];
  return ranks->failed() ? -1 : total;
}

// A copy of `bytes`, of which each thread does its part.
LLMBUILD_EXPORT double copy_seconds(int threads, int64_t calls, uint8_t* to, const uint8_t* from,
                                    int64_t bytes) {
  return seconds_per_call(threads, 0, calls, [&](const Worker& worker, int64_t) {
    const Range lines = split(int((bytes + 63) / 64), worker);
    const int64_t begin = int64_t(64) * lines.begin;
    std::memcpy(to + begin, from + begin, std::min(bytes, int64_t(64) * lines.end) - begin);
    asm volatile("" : : "r"(to) : "memory");  // it has to be there
  });
}

LLMBUILD_EXPORT double shared_bytes(int ranks, int64_t max_floats) {
  return double(ranks_bytes(ranks, 1, max_floats));
}
