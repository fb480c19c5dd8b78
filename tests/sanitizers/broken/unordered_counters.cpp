// ThreadSanitizer must report this: the counters that processes share order nothing, so that who has seen one may read what was
// there before.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#define memory_order_acquire memory_order_relaxed
#define memory_order_release memory_order_relaxed
#include "../shared.cpp"
