// Fast path of a ring (executor/multiproc/ring.py) for messages that fit into one slot, which are nearly all messages. One call
// writes, and one call reads, a message. If messages are rare, Python's code for the ring is not in the CPU caches, and would take
// most of the time of a message. Python code handles all other cases.
// If messages arrive at regular intervals, a waiting reader can wake up shortly before the next message, because to wake a thread
// takes longer than all other work on a message.

#include "words.h"

#ifdef __linux__

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstring>

using penstock::Word;

namespace {

constexpr uint32_t kClosed = 1, kStep = 2, kMask = 0x7fffffff;
constexpr int kIntervals = 16, kMost = 10;
constexpr int kSoon = -1;
constexpr int64_t kLead = 200'000;      // ns to wake before the earliest time; timers are 100 us late, and the reader needs time to start
constexpr int64_t kOverrun = 30'000;    // ns to wait beyond the latest time
constexpr int64_t kShare = 50;          // the wait without sleeping is at most a 50th of an interval
constexpr int64_t kWidest = 300'000;    // and at most this many ns, plus the lead

struct Label {
  uint64_t number, left;
};

}  // namespace

extern "C" {

// Addresses of the parts of a ring in its memory. The word after a counter says whether the process that advances this counter
// sleeps.
struct Ring {
  Word* head;
  std::atomic<int64_t>* written_at;  // time of the last message that used one slot, in ns of the monotonic clock
  char* tails;
  int64_t stride, num_readers;
  Label* labels;
  char* content;
  int64_t num_slots, slot_bytes;
};

// Times between messages for which a reader has waited. `sleeps` says whether the reader sleeps until the next message.
struct Rhythm {
  int64_t sleeps, last, count, intervals[kIntervals];
};

}  // extern "C"

namespace {

Word* tail_of(const Ring& ring, int64_t reader) { return reinterpret_cast<Word*>(ring.tails + reader * ring.stride); }

int64_t available(uint32_t head, uint32_t tail) { return ((head >> 1) - (tail >> 1)) & kMask; }

struct Window {
  int64_t from, until;  // 0: unknown
};

// Returns the times between which the next message is expected, if most of the last intervals between messages are similar.
Window due(const Rhythm& rhythm) {
  if (rhythm.count < kIntervals) return {0, 0};
  int64_t sorted[kIntervals];
  std::copy_n(rhythm.intervals, kIntervals, sorted);
  std::sort(sorted, sorted + kIntervals);
  const int64_t width = std::min(sorted[kIntervals / 2] / kShare - kLead, kWidest);
  int first = 0, most = 0;
  for (int i = 0; i < kIntervals; ++i) {
    const int count = static_cast<int>(std::upper_bound(sorted + i, sorted + kIntervals, sorted[i] + width) - sorted) - i;
    if (count > most) first = i, most = count;
  }
  if (width <= 0 || most < kMost) return {0, 0};
  const int64_t latest = std::min(sorted[first + most - 1] + kOverrun, sorted[first] + width);
  return {rhythm.last + sorted[first] - kLead, rhythm.last + latest};
}

void note(Rhythm& rhythm, int64_t at) {
  if (at <= rhythm.last) return;  // the message used several slots, so its time is unknown
  if (rhythm.last) rhythm.intervals[rhythm.count++ % kIntervals] = at - rhythm.last;
  rhythm.last = at;
}

void keep_time() {
  thread_local bool kept = false;
  if (!kept) prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  kept = true;
}

// Waits like `penstock::spin_until`, but yields the core to other threads, because one of these threads may be the writer.
bool attend(const Word* word, uint32_t seen, int64_t until) {
  constexpr int64_t kTurn = 10'000;
  for (int64_t at = penstock::now(); at < until; at = penstock::now()) {
    if (penstock::spin_until(word, seen, std::min(at + kTurn, until))) return true;
    sched_yield();
  }
  return word->load(std::memory_order_acquire) != seen;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Writes message `number` into one slot, and returns 1. Returns 0 if this is not possible without waiting, or if the message needs
// several slots.
int penstock_ring_put(const Ring* ring, uint64_t number, const void* message, int64_t length) {
  const uint32_t head = ring->head->load(std::memory_order_relaxed);
  if (length > ring->slot_bytes || head & kClosed) return 0;
  for (int64_t reader = 0; reader < ring->num_readers; ++reader) {
    const uint32_t tail = tail_of(*ring, reader)->load(std::memory_order_acquire);
    if (tail & kClosed || available(head, tail) >= ring->num_slots) return 0;
  }
  const int64_t slot = (head >> 1) % ring->num_slots;
  ring->labels[slot] = {number, static_cast<uint64_t>(length)};
  std::memcpy(ring->content + slot * ring->slot_bytes, message, length);
  ring->written_at->store(penstock::now(), std::memory_order_relaxed);
  ring->head->fetch_add(kStep, std::memory_order_release);
  penstock::wake(ring->head, tail_of(*ring, 0) + 1, ring->num_readers, ring->stride);
  return 1;
}

// Reads message `number` from one slot into `to`. Returns the length of the message, or -1 if the message has not arrived or uses
// several slots.
int64_t penstock_ring_take(const Ring* ring, int64_t reader, uint64_t number, Rhythm* rhythm, void* to) {
  Word* tail = tail_of(*ring, reader);
  const uint32_t read = tail->load(std::memory_order_relaxed), head = ring->head->load(std::memory_order_acquire);
  if (read & kClosed || !available(head, read)) return -1;
  const int64_t slot = (read >> 1) % ring->num_slots;
  const Label label = ring->labels[slot];
  if (label.number != number || label.left > static_cast<uint64_t>(ring->slot_bytes)) return -1;
  if (rhythm) {
    if (rhythm->sleeps) note(*rhythm, ring->written_at->load(std::memory_order_relaxed));
    rhythm->sleeps = 0;
  }
  std::memcpy(to, ring->content + slot * ring->slot_bytes, label.left);
  tail->fetch_add(kStep, std::memory_order_release);
  penstock::wake(tail, ring->head + 1, 1, 0);
  return label.left;
}

// Waits until the writer's counter (head) differs from `seen`, like `penstock_word_wait`. If the expected time of the next message
// is known, the function returns -1 once, shortly before this time. If `is_soon` is not 0, the function instead watches the head
// without sleeping, until the message is overdue. `rhythm` is null for readers that do not wake early.
int penstock_ring_wait(const Ring* ring, int64_t reader, uint32_t seen, Rhythm* rhythm, int is_soon, int64_t spin_ns, int64_t deadline) {
  Word* sleeping = tail_of(*ring, reader) + 1;
  const Window window = rhythm ? due(*rhythm) : Window{0, 0};
  const int64_t began = penstock::now();
  if (!is_soon && window.from > began && (deadline < 0 || window.from < deadline)) {
    keep_time();
    rhythm->sleeps = 1;
    const int result = penstock::sleep_until(ring->head, seen, sleeping, window.from);
    return result == ETIMEDOUT ? kSoon : result;
  }
  if (began < window.until) {
    if (attend(ring->head, seen, std::min(window.until, began + window.until - window.from))) return 0;
  } else if (spin_ns > 0 && penstock::spin_until(ring->head, seen, began + spin_ns)) {
    return 0;
  }
  if (rhythm) rhythm->sleeps = 1;
  return penstock::sleep_until(ring->head, seen, sleeping, deadline);
}

}  // extern "C"
#pragma GCC visibility pop

#endif  // __linux__
