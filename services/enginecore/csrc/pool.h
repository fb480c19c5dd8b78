// Threads that work through programs together.
//
// A program is a sequence of phases, a phase a number of independent tasks. Threads take tasks one by one, and a phase is
// over when its tasks are done, whoever did them: a thread that the system has put aside, because other processes use the
// core, holds up nobody unless it is in the middle of a task. That is what makes it sensible to compute on every core of a
// machine whose cores also serve.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace penstock {

void relax();

// Counters carry the number of their program in the upper half, so that a thread that comes late finds it is over.
struct alignas(64) Phase {
  std::atomic<uint64_t> next{0};
  alignas(64) std::atomic<uint64_t> done{0};
};

// A thread's way through the phases of one program.
class Cursor {
 public:
  Cursor(Phase* phases, int num_phases, uint64_t program)
      : phase_(phases), end_(phases + num_phases), program_(program << 32) {}

  // Does tasks of the next phase until none is left, then waits for those of other threads. False: the program is over.
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

// A number that says how many tasks a phase has: the one thing of a program that a thread may read when the program is over.
//
// A late thread of program P reads the count, then `next` of the phase, while the caller prepares P + 1: it stores the new
// number of the program into `next`, then a new count. The count is stored with release and loaded with acquire. So a thread
// that loads a count of P + 1 synchronizes with that store, the store into `next` before it happens before the thread's load of
// `next`, and the thread finds that P is over. With relaxed stores, or plain ones, a weakly ordered processor (and any compiler)
// may let the count be seen first: a thread could take a task of the new count under the old number. Weaker than release and
// acquire is wrong, stronger buys nothing: no third thing is ordered. Everything else that a program reads, it reads in its
// tasks. A thread that took a task of P holds the caller in P until the task is done (`done`: release, acquire), and what the
// caller wrote for P happens before, by `started_`.
class Count {
 public:
  void operator=(int64_t count) { count_.store(count, std::memory_order_release); }
  operator int64_t() const { return count_.load(std::memory_order_acquire); }

 private:
  std::atomic<int64_t> count_{0};
};

class Pool {
 public:
  static constexpr int kMaxPhases = 18432;  // of a program; of which there are 22 at most per layer of a decoder
  // A program and what it works on, as one: a thread that comes late has both of one program.
  struct Job {
    void (*program)(void* argument, Cursor& cursor);
    void* argument;
  };

  // The calling thread counts as one of `threads`.
  explicit Pool(int threads);
  ~Pool();
  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Ends the program before for threads that are late. Call it before anything changes that a program reads: such a thread
  // may still ask for the number of tasks of a phase, which therefore is a Count or never changes, but finds that none is left
  // to take. The next program has `num_phases` at most.
  void prepare(int num_phases);
  // Runs a job's program. The job and its argument must stay where they are until `quiet`.
  void run(const Job& job);
  // Waits until no thread is left in a program, late ones included: what they read may go then.
  void quiet();

 private:
  void work();

  const std::unique_ptr<Phase[]> phases_;
  std::atomic<int> num_phases_{0};
  uint32_t number_ = 0;
  std::atomic<const Job*> job_{nullptr};
  alignas(64) std::atomic<uint32_t> started_{0};
  std::atomic<int> inside_{0};  // threads that have, or are about to have, a program
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace penstock
