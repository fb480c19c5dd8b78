// What a processor gives, for roofline.py: bytes read and bytes copied per second, from memory, and products with sums of floats
// that are in registers, of floats and, where there are instructions for them, of pairs of bfloat16, by so many threads at once.
// Compiled with the vectors of one of the kernels' instruction sets.

#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <thread>
#include <vector>

#include "vec.h"

#if defined(PENSTOCK_AVX512_BF16)
#include <immintrin.h>
#endif

namespace {

using penstock::kLanes;
using penstock::vf;

constexpr int64_t kFloats = 16 << 20;  // of a thread: 64 MiB
constexpr int64_t kTurns = 1 << 20;
constexpr int kSums = 10;  // enough to hide the latency of two products a cycle, few enough to stay in 16 registers
constexpr int kRounds = 5;

// On huge pages where the system has them, as weights are.
float* ones() {
  constexpr size_t kBytes = kFloats * sizeof(float), kHugePage = 2 << 20;
  void* memory = std::aligned_alloc(kHugePage, kBytes);
  if (memory == nullptr) std::abort();
#ifdef MADV_HUGEPAGE
  madvise(memory, kBytes, MADV_HUGEPAGE);
#endif
  std::fill_n(static_cast<float*>(memory), kFloats, 1.0f);
  return static_cast<float*>(memory);
}

// Keeps the compiler from leaving out what `sums` were computed for.
void use(vf (&sums)[kSums]) {
  for (vf& sum : sums) asm volatile("" : "+m"(sum));
}

void read(const float* from) {
  vf sums[kSums] = {};
  for (int64_t i = 0; i + kSums * kLanes <= kFloats; i += kSums * kLanes)
#pragma GCC unroll 16
    for (int j = 0; j < kSums; ++j) sums[j] += penstock::load(from + i + j * kLanes);
  use(sums);
}

// `add(sum, x, y)`: the next sum, of as many products as a lane has.
template <class Add>
void multiply(const Add& add) {
  vf sums[kSums] = {};
  vf x = penstock::splat(0.5f), y = penstock::splat(0.25f);
  asm volatile("" : "+m"(x), "+m"(y));
  for (int64_t i = 0; i < kTurns; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < kSums; ++j) sums[j] = add(sums[j], x, y);
  use(sums);
}

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Processor seconds of the slowest thread in the fastest round.
double fastest(int threads, const std::function<void(int)>& body) {
  double best = 1e30;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> taken(threads);
    std::vector<std::thread> running;
    std::barrier start(threads);
    for (int i = 0; i < threads; ++i)
      running.emplace_back([&, i] {
        start.arrive_and_wait();
        const double began = thread_seconds();
        body(i);
        taken[i] = thread_seconds() - began;
      });
    for (std::thread& thread : running) thread.join();
    best = std::min(best, *std::max_element(taken.begin(), taken.end()));
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc == 2 ? std::atoi(argv[1]) : 0;
  if (threads < 1) {
    std::fprintf(stderr, "usage: ceilings THREADS\n");
    return 2;
  }
  std::vector<float*> from(threads), to(threads);  // until the process ends
  std::generate(from.begin(), from.end(), ones);
  std::generate(to.begin(), to.end(), ones);
  const double bytes = 4.0 * kFloats * threads;
  const double reading = fastest(threads, [&](int i) { read(from[i]); });
  const double copying = fastest(threads, [&](int i) { std::memcpy(to[i], from[i], 4 * kFloats); });
  const double flops = 2.0 * kTurns * kSums * kLanes * threads;
  const double multiplying = fastest(threads, [](int) { multiply([](vf sum, vf x, vf y) { return sum * x + y; }); });
  double pairs = 0;
#if defined(PENSTOCK_AVX512_BF16)
  const auto add_pairs = [](vf sum, vf x, vf y) -> vf {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y));
  };
  pairs = 2 * flops / fastest(threads, [&](int) { multiply(add_pairs); });
#endif
  std::printf("%f %f %f %f\n", bytes / reading / 1e9, 2 * bytes / copying / 1e9, flops / multiplying / 1e9, pairs / 1e9);
  return 0;
}
