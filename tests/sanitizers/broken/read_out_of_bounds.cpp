// AddressSanitizer must report this: a read behind the end of memory from the heap.
#include <cstdlib>

int main(int argc, char**) {
  float* numbers = static_cast<float*>(std::malloc(16 * sizeof(float)));
  for (int i = 0; i < 16; ++i) numbers[i] = static_cast<float>(i);
  const float behind = numbers[15 + argc];
  std::free(numbers);
  return behind == 0.5f;
}
