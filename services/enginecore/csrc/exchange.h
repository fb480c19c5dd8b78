// Sums and gathers among processes of one host, in memory that they share. Linux alone has them.
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

// `base`: a line for each of `size` processes, then two slots of `piece` bytes for each; zeros at first. `kind`: 0 for float32, 1 for
// bfloat16. Sums `data` of all processes, in place. All call the same in the same order.
void penstock_all_reduce(void* base, int64_t rank, int64_t size, int64_t piece, void* data, int64_t count, int64_t kind);

// `out`: the `bytes` of each process, one behind the other.
void penstock_all_gather(void* base, int64_t rank, int64_t size, int64_t piece, const void* data, void* out, int64_t bytes);

}  // extern "C"
#pragma GCC visibility pop

#else

inline void penstock_all_reduce(void*, int64_t, int64_t, int64_t, void*, int64_t, int64_t) { std::abort(); }

#endif  // __linux__
