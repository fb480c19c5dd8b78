// Threads that execute programs together.
//
// A program is a sequence of phases, and a phase is a number of independent tasks. Threads take tasks one by one. A phase is over
// when its tasks are done, by any threads. So if the system suspends a thread because other processes use its core, the other
// threads only wait for it if it is in the middle of a task. This makes it reasonable to compute on all cores of a machine that
// also serves requests.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace penstock {

void relax();

// Counters of a phase. The upper half holds the number of the program, so that a late thread notices that the program is over.
struct alignas(64) Phase {
  std::atomic<uint64_t> next{0};
  alignas(64) std::atomic<uint64_t> done{0};
};

// Position of a thread in the phases of one program.
class Cursor {
 public:
  Cursor(Phase* phases, int num_phases, uint64_t program)
      : phase_(phases), end_(phases + num_phases), program_(program << 32) {}

  // Runs tasks of the next phase until none is left, then waits for those of other threads. Returns false if the program is over.
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

// Number of tasks of a phase. It is the only data of a program that a thread may read after the program is over.
//
// A late thread of program P reads the count and then `next` of the phase, while the caller prepares P + 1. The caller stores the
// new program number into `next` and then a new count. The count is stored with release and loaded with acquire. So a thread that
// loads a count of P + 1 synchronizes with that store. The store into `next` then happens before the thread's load of `next`, and
// the thread finds that P is over. With relaxed or plain stores, a weakly ordered processor or a compiler may let the count be seen
// first. A thread could then take a task of the new count under the old number. Nothing weaker than release and acquire is correct,
// and nothing stronger is needed, because no third object is involved. A program reads all other data in its tasks. A thread that
// took a task of P holds the caller in P until the task is done (`done`: release, acquire), and the caller's writes for P happen
// before, by `started_`.
class Count {
 public:
  void operator=(int64_t count) { count_.store(count, std::memory_order_release); }
  operator int64_t() const { return count_.load(std::memory_order_acquire); }

 private:
  std::atomic<int64_t> count_{0};
};

class Pool {
 public:
  static constexpr int kMaxPhases = 18432;  // of a program; a decoder layer has at most 22
  // Program and its data as one object, so that a late thread never mixes two programs.
  struct Job {
    void (*program)(void* argument, Cursor& cursor);
    void* argument;
  };

  // Starts `threads` threads, including the calling thread.
  explicit Pool(int threads);
  ~Pool();
  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Ends the previous program for late threads. Call it before changing anything that a program reads. A late thread may still ask
  // for the number of tasks of a phase, so that number is a Count or never changes, but it finds no task. The next program has at
  // most `num_phases` phases.
  void prepare(int num_phases);
  // Runs a job's program. The job and its argument must stay in place until `quiet`.
  void run(const Job& job);
  // Waits until no thread is in a program, including late ones. The data that they read may be freed afterwards.
  void quiet();

 private:
  void work();

  const std::unique_ptr<Phase[]> phases_;
  std::atomic<int> num_phases_{0};
  uint32_t number_ = 0;
  std::atomic<const Job*> job_{nullptr};
  alignas(64) std::atomic<uint32_t> started_{0};
  std::atomic<int> inside_{0};  // threads that have a program, or are about to get one
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace penstock
