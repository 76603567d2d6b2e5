import os
import time

import pytest
from kernel_harness import LEVELS, KernelCompiler, Library

SOURCE = """
#include <algorithm>
#include <memory>
// Every worker counts in `rounds` rounds; returns how often a worker left a barrier early.
extern "C" int count_in_rounds(int threads, int rounds) {
  std::atomic<int> arrivals{0}, violations{0};
  with_team(threads, [&](const Worker& worker) {
    for (int round = 1; round <= rounds; ++round) {
      ++arrivals;
      worker.barrier();
      if (arrivals.load() != round * worker.count) ++violations;
      worker.barrier();
    }
  });
  return violations.load();
}
static std::unique_ptr<Team> kept;
static std::atomic<int> calls;
extern "C" void start_team(int threads, int pin) { kept.reset(new Team(threads, pin)); calls = 0; }
extern "C" void stop_team() { kept.reset(); }
extern "C" int run_steps(int steps) {
  for (int i = 0; i < steps; ++i) {
    kept->run([](const Worker& worker, void*) { calls += 1 + worker.id; }, nullptr);
  }
  return calls.load();
}
extern "C" int processors_of_worker(int id) {
  struct Query { int id, count; } query{id, 0};
  kept->run([](const Worker& worker, void* argument) {
    Query* q = static_cast<Query*>(argument);
    cpu_set_t mask;
    pthread_getaffinity_np(pthread_self(), sizeof(mask), &mask);
    if (worker.id == q->id) q->count = CPU_COUNT(&mask);
  }, &query);
  return query.count;
}
// Steps from a thread of its own, which keeps to the processor `cpu`: does it still, afterwards?
extern "C" int caller_stays_on(int cpu) {
  bool stays = false;
  std::thread([&] {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(cpu, &mask);
    pthread_setaffinity_np(pthread_self(), sizeof(mask), &mask);
    kept->run([](const Worker&, void*) {}, nullptr);
    cpu_set_t after;
    pthread_getaffinity_np(pthread_self(), sizeof(after), &after);
    stays = CPU_EQUAL(&mask, &after);
  }).join();
  return stays;
}
extern "C" int split_is_a_partition(int n, int count) {
  int next = 0, smallest = n, largest = 0;
  for (int id = 0; id < count; ++id) {
    const Range range = split(n, Worker{id, count});
    if (range.begin != next) return 0;
    next = range.end;
    smallest = std::min(smallest, range.end - range.begin);
    largest = std::max(largest, range.end - range.begin);
  }
  return next == n && largest - smallest <= 1;
}
"""


@pytest.fixture(scope="module")
def library(compiler: KernelCompiler) -> Library:
    return compiler.library(SOURCE, LEVELS[0])


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_no_worker_passes_a_barrier_before_all_arrived(library: Library, threads: int) -> None:
    assert library.call("count_in_rounds", threads, 500) == 0


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_worker_runs_every_step_also_after_sleeping(library: Library, threads: int) -> None:
    library.call("start_team", threads, 0)
    per_step = threads * (threads + 1) // 2
    assert library.call("run_steps", 100) == 100 * per_step
    for pause in range(20):
        time.sleep(0.001 * (pause % 3))
        library.call("run_steps", 1)
    assert library.call("run_steps", 0) == 120 * per_step
    library.call("stop_team")


def test_an_idle_team_uses_no_processor(library: Library) -> None:
    library.call("start_team", 4, 0)
    library.call("run_steps", 1)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.01
    library.call("stop_team")


def test_a_pinned_team_keeps_each_worker_on_one_processor(library: Library) -> None:
    library.call("start_team", 3, 1)
    assert [library.call("processors_of_worker", i) for i in range(3)] == [1, 1, 1]
    library.call("stop_team")


def test_a_pinned_team_gives_every_caller_its_processors_back(library: Library) -> None:
    library.call("start_team", 2, 1)
    before = os.sched_getaffinity(0)
    library.call("run_steps", 1)
    assert os.sched_getaffinity(0) == before
    for cpu in sorted(before):
        assert library.call("caller_stays_on", cpu)
    library.call("stop_team")
    assert os.sched_getaffinity(0) == before


def test_split_covers_all_units_evenly(library: Library) -> None:
    for n in (0, 1, 2, 7, 16, 97):
        for count in (1, 2, 3, 8, 100):
            assert library.call("split_is_a_partition", n, count)
