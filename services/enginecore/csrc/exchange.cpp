// Collective operations (sum and gather) of processes on one host, in shared memory.
// Each process has a counter and two slots. A process writes a piece into one of its slots and then advances its counter. Once all
// counters have reached the number of the piece, each process reads the slots of all processes in the same order. So all processes
// get bit-identical results. A slot is reused for every second piece. This is safe: once the counter of a process has reached the
// next piece, this process has read the previous piece.

#include "exchange.h"

#ifdef __linux__

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kLine = 128;
constexpr int64_t kSpin = 50'000;  // nanoseconds

struct Exchange {
  char* base;
  int64_t rank, size, piece;

  uint32_t* counter(int64_t of) const { return reinterpret_cast<uint32_t*>(base + of * kLine); }
  uint32_t* sleepers(int64_t of) const { return counter(of) + 1; }
  char* slot(int64_t of, uint32_t number) const {
    return base + size * kLine + (2 * of + (number & 1)) * piece;
  }
};

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

bool reached(const uint32_t* counter, uint32_t number) {
  return static_cast<int32_t>(__atomic_load_n(counter, __ATOMIC_ACQUIRE) - number) >= 0;
}

// Waits until the counter of process `of` has reached piece `number`.
void wait_for(const Exchange& exchange, int64_t of, uint32_t number) {
  uint32_t* counter = exchange.counter(of);
  for (int64_t until = penstock::nanoseconds() + kSpin; penstock::nanoseconds() < until;) {
    for (int i = 0; i < 64; ++i) {
      if (reached(counter, number)) return;
      relax();
    }
  }
  uint32_t* sleepers = exchange.sleepers(of);
  __atomic_fetch_add(sleepers, 1, __ATOMIC_SEQ_CST);
  for (;;) {
    const uint32_t seen = __atomic_load_n(counter, __ATOMIC_SEQ_CST);
    if (static_cast<int32_t>(seen - number) >= 0) break;
    syscall(SYS_futex, counter, FUTEX_WAIT, seen, nullptr, nullptr, 0);
  }
  __atomic_fetch_sub(sleepers, 1, __ATOMIC_SEQ_CST);
}

// Advances the counter of this process, because its slot now contains piece `number`.
void tell(const Exchange& exchange, uint32_t number) {
  uint32_t* counter = exchange.counter(exchange.rank);
  __atomic_store_n(counter, number, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(exchange.sleepers(exchange.rank), __ATOMIC_SEQ_CST) == 0) return;
  syscall(SYS_futex, counter, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

uint32_t put(const Exchange& exchange, const char* data, int64_t bytes) {
  const uint32_t number = *exchange.counter(exchange.rank) + 1;
  std::memcpy(exchange.slot(exchange.rank, number), data, bytes);
  tell(exchange, number);
  for (int64_t of = 0; of < exchange.size; ++of) {
    if (of != exchange.rank) wait_for(exchange, of, number);
  }
  return number;
}

float from_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float number;
  std::memcpy(&number, &wide, sizeof number);
  return number;
}

// Rounds a float to the nearest bfloat16, ties to even. NaN stays NaN.
uint16_t to_bfloat16(float number) {
  uint32_t wide;
  std::memcpy(&wide, &number, sizeof wide);
  if (number != number) return static_cast<uint16_t>((wide >> 16) | 0x40);
  return static_cast<uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
}

void sum_floats(const Exchange& exchange, uint32_t number, float* out, int64_t count) {
  std::memcpy(out, exchange.slot(0, number), count * sizeof(float));
  for (int64_t of = 1; of < exchange.size; ++of) {
    const float* other = reinterpret_cast<const float*>(exchange.slot(of, number));
    for (int64_t i = 0; i < count; ++i) out[i] += other[i];
  }
}

void sum_bfloat16(const Exchange& exchange, uint32_t number, uint16_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0.0f;
    for (int64_t of = 0; of < exchange.size; ++of) {
      sum += from_bfloat16(reinterpret_cast<const uint16_t*>(exchange.slot(of, number))[i]);
    }
    out[i] = to_bfloat16(sum);
  }
}

}  // namespace

void penstock_all_reduce(
    void* base, int64_t rank, int64_t size, int64_t piece, void* data, int64_t count, int64_t kind) {
  const Exchange exchange{static_cast<char*>(base), rank, size, piece};
  const int64_t width = kind == 0 ? 4 : 2, most = piece / width;
  char* place = static_cast<char*>(data);
  for (int64_t done = 0; done < count; done += most) {
    const int64_t here = count - done < most ? count - done : most;
    char* from = place + done * width;
    const uint32_t number = put(exchange, from, here * width);
    if (kind == 0) {
      sum_floats(exchange, number, reinterpret_cast<float*>(from), here);
    } else {
      sum_bfloat16(exchange, number, reinterpret_cast<uint16_t*>(from), here);
    }
  }
}

void penstock_all_gather(
    void* base, int64_t rank, int64_t size, int64_t piece, const void* data, void* out, int64_t bytes) {
  const Exchange exchange{static_cast<char*>(base), rank, size, piece};
  for (int64_t done = 0; done < bytes; done += piece) {
    const int64_t here = bytes - done < piece ? bytes - done : piece;
    const uint32_t number = put(exchange, static_cast<const char*>(data) + done, here);
    for (int64_t of = 0; of < size; ++of) {
      std::memcpy(static_cast<char*>(out) + of * bytes + done, exchange.slot(of, number), here);
    }
  }
}

#endif  // __linux__
