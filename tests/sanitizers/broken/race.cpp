// ThreadSanitizer must report this: what a late thread of the pool may read is a plain number, not a penstock::Count.
#include <thread>

#include "pool.h"

struct Sums {
  long num_tasks = 0;
  long sums[64] = {};
  void run(penstock::Cursor& cursor) {
    cursor(num_tasks, [this](long task) { sums[task] += task; });
  }
};

int main() {
  penstock::Pool pool(4);
  Sums sums;
  const penstock::Pool::Job job{[](void* self, penstock::Cursor& cursor) { static_cast<Sums*>(self)->run(cursor); }, &sums};
  for (int i = 0; i < 5000; ++i) {
    pool.prepare(1);
    sums.num_tasks = 1 + i % 64;
    pool.run(job);
  }
  pool.quiet();
}
