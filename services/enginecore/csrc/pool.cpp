#include "pool.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock {

namespace {
constexpr int kIdleSpins = 500;  // about the number of microseconds that a thread spins: longer than the usual time between steps
}

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

Pool::Pool(int threads) : phases_(new Phase[kMaxPhases]) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
  stop_.store(true, std::memory_order_release);
  started_.fetch_add(1, std::memory_order_acq_rel);
  started_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::prepare(int num_phases) {
  const uint64_t fresh = static_cast<uint64_t>(++number_) << 32;
  for (int i = 0; i < std::max(num_phases, num_phases_.load(std::memory_order_relaxed)); ++i) {
    phases_[i].next.store(fresh, std::memory_order_release);
    phases_[i].done.store(fresh, std::memory_order_release);
  }
  num_phases_.store(num_phases, std::memory_order_relaxed);
}

void Pool::run(const Job& job) {
  job_.store(&job);
  if (!workers_.empty()) {
    started_.store(number_);  // sequentially consistent, so that this store comes before `notify_all` looks for waiting threads
    started_.notify_all();
  }
  Cursor cursor(phases_.get(), num_phases_.load(std::memory_order_relaxed), number_);
  job.program(job.argument, cursor);
}

void Pool::quiet() {
  static constexpr Job kNothing{[](void*, Cursor&) {}, nullptr};
  prepare(0);
  job_.store(&kNothing);
  while (inside_.load() != 0) std::this_thread::yield();
}

void Pool::work() {
  uint32_t seen = 0;
  for (;;) {
    for (int spins = 0; spins < kIdleSpins && started_.load(std::memory_order_acquire) == seen; ++spins) relax();
    started_.wait(seen, std::memory_order_acquire);
    // The order of this load and the check of `stop_` matters. A thread that woke for the last program and is suspended here may
    // load the number that the destructor has stored. If the thread checked `stop_` before this load, it would treat the
    // destructor's number as already seen, and sleep forever.
    seen = started_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_acquire)) return;
    inside_.fetch_add(1);  // this must be before the job is read, because `quiet` replaces the job and then reads this counter
    Cursor cursor(phases_.get(), num_phases_.load(std::memory_order_relaxed), seen);
    const Job* job = job_.load();
    job->program(job->argument, cursor);
    inside_.fetch_sub(1);
  }
}

}  // namespace penstock
