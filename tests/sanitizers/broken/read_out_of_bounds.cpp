// AddressSanitizer must report this: a read behind the end of memory from the heap, by a pointer whose origin no compiler sees.
#include <cstdlib>

int main(int argc, char**) {
  float* volatile numbers = static_cast<float*>(std::calloc(16, sizeof(float)));
  const float behind = numbers[15 + argc];
  std::free(numbers);
  return behind == 0.5f;
}
