// Shares the units of work of a call among XLA's own threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxpage {

// XLA's threads flush subnormal numbers to zero and the thread that calls may not: a row's bits
// must not tell who computed it.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned int before_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | (1ull << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks for `until()` for a while, which is longer than the pause between two calls of a step and
// shorter than sleeping and being woken some times. Other threads that could run on this core go
// first. Returns whether it came.
template <typename Until>
bool spin_until(std::chrono::microseconds while_, const Until& until) {
  const auto end = std::chrono::steady_clock::now() + while_;
  do {
    for (int i = 0; i < 32; ++i) {
      if (until()) return true;
      pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// Work(i) for i of [0, count), each once and in any order.
struct Phase {
  int64_t count, at_once;
  std::function<void(int64_t)> work;
};

// Holds what a call shares with threads that help it. A phase begins when all units of the one
// before are done, whoever did them: so a call waits for no thread that has not come. One that
// starts late finds nothing to do, perhaps when the call has returned.
class SharedCall {
 public:
  SharedCall(std::vector<Phase> phases, int64_t num_threads)
      : phases_(std::move(phases)),
        num_ranges_(num_threads),
        num_done_(phases_.size()),
        ranges_(phases_.size() * num_threads) {
    for (size_t i = 0; i < phases_.size(); ++i)
      for (int64_t j = 0; j < num_ranges_; ++j) {
        range(i, j).next = phases_[i].count * j / num_ranges_;
        range(i, j).end = phases_[i].count * (j + 1) / num_ranges_;
      }
  }

  void take_part() {
    FlushSubnormals flushed;
    const int64_t thread = num_threads_.fetch_add(1);
    for (size_t i = 0; i < phases_.size(); ++i) {
      if (i) wait(i - 1);
      take_part(i, thread);
    }
  }

  void wait() { wait(phases_.size() - 1); }

 private:
  // Each thread has its own range of units, so that it reads memory in one place from there on, and
  // helps with those of others when it has done its own.
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };

  Range& range(size_t phase, int64_t thread) {
    return ranges_[phase * num_ranges_ + thread % num_ranges_];
  }

  void take_part(size_t phase, int64_t thread) {
    const Phase& current = phases_[phase];
    int64_t num_done = 0;
    for (int64_t i = 0; i < num_ranges_; ++i) {
      Range& from = range(phase, thread + i);
      for (int64_t first; (first = from.next.fetch_add(current.at_once)) < from.end;)
        for (int64_t unit = first; unit < from.end && unit < first + current.at_once; ++unit) {
          current.work(unit);
          ++num_done;
        }
    }
    if (num_done == 0 || num_done_[phase].fetch_add(num_done) + num_done < current.count) return;
    std::lock_guard<std::mutex> lock(mutex_);
    done_.notify_all();
  }

  void wait(size_t phase) {
    const auto all_done = [&] { return num_done_[phase].load() == phases_[phase].count; };
    if (spin_until(std::chrono::microseconds(20), all_done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, all_done);
  }

  const std::vector<Phase> phases_;
  const int64_t num_ranges_;
  std::atomic<int64_t> num_threads_{0};
  std::vector<std::atomic<int64_t>> num_done_;
  std::vector<Range> ranges_;  // [phases, num_ranges_]
  std::mutex mutex_;
  std::condition_variable done_;
};

// Threads that helped stay for the next call of a step. To wake one takes as long as a small
// product does, and Linux may let the thread that is woken run on the core of the one that wakes
// it, with the other core idle.
class Helpers {
 public:
  void help(std::shared_ptr<SharedCall> shared) {
    shared->take_part();
    num_staying_.fetch_add(1);
    for (int64_t last_call = num_calls_.load(); spin_until(
             std::chrono::microseconds(100), [&] { return num_calls_.load() != last_call; });) {
      last_call = num_calls_.load();
      shared = std::atomic_load(&last_);
      shared->take_part();
    }
    num_staying_.fetch_sub(1);
  }

  // Gives those who stayed another call. Returns how many they are.
  int64_t call(const std::shared_ptr<SharedCall>& shared) {
    std::atomic_store(&last_, shared);
    num_calls_.fetch_add(1);
    return num_staying_.load();
  }

 private:
  std::shared_ptr<SharedCall> last_;
  std::atomic<int64_t> num_calls_{0}, num_staying_{0};
};

inline Helpers& helpers() {
  // It is never destroyed: threads of the pool may be in it at the end of the process.
  static Helpers* all = new Helpers;
  return *all;
}

// Runs phases one after the other, on the calling thread and on those of the pool that are free.
// Returns when all work has returned.
inline void run_phases(xla::ffi::ThreadPool& pool, std::vector<Phase> phases) {
  int64_t num_helpers = 0;
  for (const Phase& phase : phases)
    num_helpers = std::max(num_helpers, (phase.count + phase.at_once - 1) / phase.at_once - 1);
  num_helpers = std::min<int64_t>(num_helpers, pool.num_threads() - 1);
  if (num_helpers <= 0) {
    FlushSubnormals flushed;
    for (const Phase& phase : phases)
      for (int64_t unit = 0; unit < phase.count; ++unit) phase.work(unit);
    return;
  }
  auto shared = std::make_shared<SharedCall>(std::move(phases), num_helpers + 1);
  for (int64_t i = helpers().call(shared); i < num_helpers; ++i)
    pool.Schedule([shared] { helpers().help(shared); });
  shared->take_part();
  shared->wait();
}

// Calls work(i) for i of [0, count), each once; see `run_phases`.
template <typename Work>
void run_in_parallel(xla::ffi::ThreadPool& pool, int64_t count, int64_t at_once, const Work& work) {
  run_phases(pool, {{count, at_once, std::ref(work)}});
}

}  // namespace jaxpage
