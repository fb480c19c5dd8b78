// Counters in shared memory, which words.cpp and ring.cpp use. A counter is a 32-bit word. If the lowest bit of the word is set,
// the counter is closed and will never be advanced again. Before a waiter sleeps, it sets a separate word. So if no waiter sleeps,
// advancing a counter needs no system call.

#pragma once

#ifdef __linux__

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

namespace penstock {

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free);

constexpr int kLooks = 64;  // number of spins between two readings of the clock

inline int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Spins until `word` differs from `seen`, and returns true. Returns false at the time `until` of the monotonic clock.
inline bool spin_until(const Word* word, uint32_t seen, int64_t until) {
  while (now() < until)
    for (int look = 0; look < kLooks; ++look) {
      if (word->load(std::memory_order_acquire) != seen) return true;
      relax();
    }
  return false;
}

inline void wake(Word* word, const Word* sleeping, int64_t count, int64_t stride) {
  // The sleeper sets its word before it reads the counter for the last time. Therefore either the sleeper sees the new value of the
  // counter, or the writer sees that the sleeper's word is set.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int64_t i = 0; i < count; ++i)
    if (reinterpret_cast<const Word*>(reinterpret_cast<const char*>(sleeping) + i * stride)->load(std::memory_order_relaxed)) {
      syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
      return;
    }
}

// Sleeps until `word` differs from `seen`, or until `deadline` if `deadline` is not negative. Only the caller may use the word
// `sleeping`. Returns 0, ETIMEDOUT, or EINTR after a signal.
inline int sleep_until(Word* word, uint32_t seen, Word* sleeping, int64_t deadline) {
  const timespec until{static_cast<time_t>(deadline / 1'000'000'000), static_cast<long>(deadline % 1'000'000'000)};
  sleeping->store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  int result = 0;
  while (!result && word->load(std::memory_order_acquire) == seen)
    if (syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, deadline < 0 ? nullptr : &until, nullptr, FUTEX_BITSET_MATCH_ANY) && errno != EAGAIN)
      result = errno;
  sleeping->store(0, std::memory_order_relaxed);
  return word->load(std::memory_order_acquire) == seen ? result : 0;
}

}  // namespace penstock

#endif  // __linux__
