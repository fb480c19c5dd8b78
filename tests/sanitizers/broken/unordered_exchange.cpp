// ThreadSanitizer must report this: as unordered_counters.cpp, of the counters of sums and gathers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#undef __ATOMIC_ACQUIRE
#define __ATOMIC_ACQUIRE __ATOMIC_RELAXED
#include "../shared.cpp"
