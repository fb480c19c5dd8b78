// Counters in shared memory (words.h). One process advances a counter, and other processes wait until the counter changes. The
// functions use futexes, so they exist only on Linux.

#include "words.h"

#ifdef __linux__

using penstock::Word;

#pragma GCC visibility push(default)
extern "C" {

uint32_t penstock_word_load(const Word* word) { return word->load(std::memory_order_acquire); }

// Adds `amount` to the counter in `word`. If one of the `count` words at `sleeping`, with a stride of `stride` bytes, is not 0,
// wakes all sleepers.
void penstock_word_add(Word* word, uint32_t amount, const Word* sleeping, int64_t count, int64_t stride) {
  word->fetch_add(amount, std::memory_order_release);
  penstock::wake(word, sleeping, count, stride);
}

// Closes the counter in `word` by setting its lowest bit, and wakes sleepers in the same way as `penstock_word_add`.
void penstock_word_close(Word* word, const Word* sleeping, int64_t count, int64_t stride) {
  word->fetch_or(1, std::memory_order_release);
  penstock::wake(word, sleeping, count, stride);
}

// Waits until `word` differs from `seen`. Spins for `spin_ns` nanoseconds, then sleeps until the time `deadline` of the monotonic
// clock, or without limit if `deadline` is negative. Only the caller may use the word `sleeping`. Returns 0, ETIMEDOUT, or EINTR
// after a signal.
int penstock_word_wait(Word* word, uint32_t seen, Word* sleeping, int64_t spin_ns, int64_t deadline) {
  if (spin_ns > 0 && penstock::spin_until(word, seen, penstock::now() + spin_ns)) return 0;
  return penstock::sleep_until(word, seen, sleeping, deadline);
}

}  // extern "C"
#pragma GCC visibility pop

#endif  // __linux__
