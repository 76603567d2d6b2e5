// A team of threads that runs whole steps: it starts once, meets at spinning barriers within a
// step, and sleeps between steps.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace llmbuild {

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() holds. Gives the processor away after a while, so that a team larger than
// the machine still goes on.
template <class Ready>
inline void spin_until(Ready ready) {
  for (int spins = 0; !ready(); ++spins) {
    if (spins < 2000) {
      cpu_pause();
    } else {
      sched_yield();
    }
  }
}

// A reusable spinning barrier. The last thread to arrive opens the next epoch.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}

  void wait() {
    const uint32_t epoch = epoch_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      epoch_.store(epoch + 1, std::memory_order_release);
    } else {
      spin_until([&] { return epoch_.load(std::memory_order_acquire) != epoch; });
    }
  }

 private:
  const int count_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
};

// One thread's view of the team: thread `id` of `count`.
struct Worker {
  int id;
  int count;
  Barrier* team_barrier = nullptr;  // null in a team of one

  void barrier() const {
    if (count > 1) team_barrier->wait();
  }
};

struct Range {
  int begin, end;
};

// This worker's share of n units: contiguous, sizes differ by one at most.
inline Range split(int n, const Worker& worker) {
  const auto bound = [&](int id) { return int(int64_t(n) * id / worker.count); };
  return {bound(worker.id), bound(worker.id + 1)};
}

// `threads` workers, of which the thread that calls run() is worker 0. With `pin`, worker i stays
// on the i-th processor of the constructing thread's affinity mask (modulo its size): the calling
// thread, which may be another each time, for the length of the call.
class Team {
 public:
  using Function = void (*)(const Worker&, void*);

  explicit Team(int threads, bool pin = false) : count_(threads), pin_(pin), barrier_(threads) {
    pthread_getaffinity_np(pthread_self(), sizeof(affinity_), &affinity_);
    try {
      for (int id = 1; id < count_; ++id) threads_.emplace_back([this, id] { serve(id); });
    } catch (...) {  // the system gave fewer: those that run must end before the error goes on
      stop();
      throw;
    }
  }

  ~Team() { stop(); }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Runs function(worker, argument) on every worker; returns when all have returned. One call at
  // a time.
  void run(Function function, void* argument) {
    publish(function, argument);
    cpu_set_t callers;
    if (pin_) {
      pthread_getaffinity_np(pthread_self(), sizeof(callers), &callers);
      pin_to_processor(0);
    }
    const Worker worker{0, count_, &barrier_};
    function(worker, argument);
    worker.barrier();
    if (pin_) pthread_setaffinity_np(pthread_self(), sizeof(callers), &callers);
  }

 private:
  // Longer than a caller takes between two steps, and too short to matter where none follows.
  static constexpr std::chrono::microseconds kSpinTime{300};

  void stop() {
    publish(nullptr, nullptr);
    for (std::thread& thread : threads_) thread.join();
  }

  void publish(Function function, void* argument) {
    function_ = function;
    argument_ = argument;
    published_.fetch_add(1);
    // Either this sees the sleeper, or the sleeper (which counts itself first) sees the step.
    if (sleeping_.load() > 0) {
      { const std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
  }

  void serve(int id) {
    if (pin_) pin_to_processor(id);
    const Worker worker{id, count_, &barrier_};
    for (uint32_t seen = 0;; ++seen) {
      await_step(seen);
      if (function_ == nullptr) return;
      function_(worker, argument_);
      worker.barrier();
    }
  }

  // Waits until more than `seen` steps were published: spins a while, then sleeps.
  void await_step(uint32_t seen) {
    const auto ready = [&] { return published_.load() != seen; };
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    do {
      for (int spins = 0; spins < 64; ++spins) {
        if (ready()) return;
        cpu_pause();
      }
    } while (std::chrono::steady_clock::now() < deadline);
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    wake_.wait(lock, ready);
    sleeping_.fetch_sub(1);
  }

  void pin_to_processor(int index) {
    index %= CPU_COUNT(&affinity_);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &affinity_) || index-- > 0) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
      return;
    }
  }

  const int count_;
  const bool pin_;
  cpu_set_t affinity_;
  Barrier barrier_;
  Function function_ = nullptr;
  void* argument_ = nullptr;
  alignas(64) std::atomic<uint32_t> published_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace llmbuild
