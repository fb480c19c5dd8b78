// Collective operations (sum and gather) of processes on one host, in shared memory. Only available on Linux.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>

namespace penstock {

inline int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace penstock

#ifdef __linux__

#pragma GCC visibility push(default)
extern "C" {

// Replaces `data` in each process by the sum of `data` of all processes. `base` is the address of the shared memory. The memory has
// one cache line for each of `size` processes, and then two slots of `piece` bytes for each process. The memory must initially be
// zero. `kind` is 0 for float32 and 1 for bfloat16. All processes must call the functions in the same order.
void penstock_all_reduce(void* base, int64_t rank, int64_t size, int64_t piece, void* data, int64_t count, int64_t kind);

// Writes `bytes` bytes of each process to `out` in all processes, in rank order.
void penstock_all_gather(void* base, int64_t rank, int64_t size, int64_t piece, const void* data, void* out, int64_t bytes);

}  // extern "C"
#pragma GCC visibility pop

#else

inline void penstock_all_reduce(void*, int64_t, int64_t, int64_t, void*, int64_t, int64_t) { std::abort(); }

#endif  // __linux__
