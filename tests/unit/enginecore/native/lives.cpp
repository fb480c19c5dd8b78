// Pools that live for one program: their threads start, sleep, wake and end in whatever order the system puts them aside. A
// thread that misses the end of its pool hangs this program.

#include <cstdio>
#include <cstdlib>

#include "pool.h"

int main(int argc, char** argv) {
  using namespace penstock;
  const int lives = argc > 1 ? std::atoi(argv[1]) : 20000;
  const Pool::Job job{[](void*, Cursor& cursor) { cursor(1, [](int64_t) {}); }, nullptr};
  for (int life = 0; life < lives; ++life) {
    Pool pool(4);
    pool.prepare(1);
    if (life % 2)
      for (int spins = 0; spins < 20000; ++spins) relax();  // the threads fall asleep
    pool.run(job);
    pool.quiet();
  }
  std::puts("every pool ended");
}
