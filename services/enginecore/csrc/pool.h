// Thread pool whose threads execute programs together.
// A program is a sequence of phases, and a phase is a number of independent tasks. Threads take tasks one by one. A phase ends when
// all its tasks are done, no matter which threads have done them. If the operating system suspends a thread because another process
// uses its core, the other threads wait for this thread only if it is in the middle of a task. Therefore the pool may use all cores
// of a machine that also runs other processes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace penstock {

void relax();

// Counters of a phase. The upper half of a counter is the number of the program, so that a late thread, which still works on an
// earlier program, detects that this program has ended.
struct alignas(64) Phase {
  std::atomic<uint64_t> next{0};
  alignas(64) std::atomic<uint64_t> done{0};
};

// Position of a thread in the sequence of phases of one program.
class Cursor {
 public:
  Cursor(Phase* phases, int num_phases, uint64_t program)
      : phase_(phases), end_(phases + num_phases), program_(program << 32) {}

  // Runs tasks of the next phase until no task is left, then waits until other threads have done their tasks. Returns false if the
  // program has ended.
  template <class Task>
  bool operator()(int64_t tasks, const Task& task) {
    if (phase_ == end_) return false;
    Phase& phase = *phase_++;
    for (;;) {
      uint64_t taken = phase.next.load(std::memory_order_acquire);
      if ((taken & kProgram) != program_) return false;
      int64_t index = static_cast<int64_t>(taken & ~kProgram);
      if (index >= tasks) break;
      if (!phase.next.compare_exchange_weak(taken, taken + 1, std::memory_order_acq_rel)) continue;
      task(index);
      phase.done.fetch_add(1, std::memory_order_release);
    }
    const uint64_t all = program_ | static_cast<uint64_t>(tasks);
    for (int spins = 0; phase.done.load(std::memory_order_acquire) != all; ++spins) {
      if ((phase.done.load(std::memory_order_acquire) & kProgram) != program_) return false;
      if (spins < kSpins) relax();
      else std::this_thread::yield();
    }
    return true;
  }

 private:
  static constexpr uint64_t kProgram = ~uint64_t{0} << 32;
  static constexpr int kSpins = 2000;
  Phase* phase_;
  Phase* end_;
  uint64_t program_;
};

// Number of tasks of a phase. This number is the only data of a program that a thread may read after the program has ended.
// A late thread of program P reads the count and then `next` of the phase, while the caller prepares program P + 1. The caller
// first stores the new program number into `next`, and then stores a new count. The count is stored with release and loaded with
// acquire. If a thread loads a count of P + 1, it synchronizes with that store. The caller's store into `next` then happens before
// the thread's load of `next`, so the thread detects that P has ended. With relaxed or plain stores, a weakly ordered processor or
// a compiler could make the count visible first. A thread could then take a task of the new count with the old program number.
// Nothing weaker than release and acquire is correct. Nothing stronger is needed, because no third object is involved. A program
// reads all other data only in its tasks. While a thread runs a task of P, the caller cannot leave P (`done`: release, acquire).
// The caller's writes for P happen before the tasks of P, through `started_`.
class Count {
 public:
  void operator=(int64_t count) { count_.store(count, std::memory_order_release); }
  operator int64_t() const { return count_.load(std::memory_order_acquire); }

 private:
  std::atomic<int64_t> count_{0};
};

class Pool {
 public:
  static constexpr int kMaxPhases = 37312;  // maximum number of phases of a program; a decoder layer has at most 46 phases
  // Program and its argument as one object, so that a late thread never combines the program of one job with the argument of
  // another job.
  struct Job {
    void (*program)(void* argument, Cursor& cursor);
    void* argument;
  };

  // Creates a pool of `threads` threads, including the calling thread, and starts the others.
  explicit Pool(int threads);
  ~Pool();
  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Ends the previous program for late threads. Call this function before data that a program reads is changed. Afterwards a late
  // thread may still read the number of tasks of a phase, but finds no task. The number of tasks must therefore be a Count, or must
  // never change. The next program may have at most `num_phases` phases.
  void prepare(int num_phases);
  // Runs a job's program. The job and its argument must stay at the same address until `quiet` returns.
  void run(const Job& job);
  // Waits until no thread, not even a late thread, is in a program. After this call, the data that programs read may be freed.
  void quiet();

 private:
  void work();

  const std::unique_ptr<Phase[]> phases_;
  std::atomic<int> num_phases_{0};
  uint32_t number_ = 0;
  std::atomic<const Job*> job_{nullptr};
  alignas(64) std::atomic<uint32_t> started_{0};
  std::atomic<int> inside_{0};  // number of threads that run a program, or are about to get a program
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace penstock
