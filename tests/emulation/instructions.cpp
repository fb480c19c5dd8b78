// The emulated instructions for tests, one at a time.

#include <immintrin.h>

#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

// c += a b. `config`: shapes of tile 0, which is c, 1, which is a, and 2. Rows are 64 bytes apart.
EXPORT void multiply(const void* config, void* c, const void* a, const void* b) {
  _tile_loadconfig(config);
  _tile_loadd(0, c, 64);
  _tile_loadd(1, a, 64);
  _tile_loadd(2, b, 64);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, c, 64);
  _tile_release();
}

EXPORT void clear(const void* config, void* c) {
  _tile_loadconfig(config);
  _tile_loadd(0, c, 64);
  _tile_zero(0);
  _tile_stored(0, c, 64);
  _tile_release();
}

// c += a b, pair by pair.
EXPORT void add_pairs(float* c, const void* a, const void* b) {
  __m512 sums;
  __m512bh left, right;
  std::memcpy(&sums, c, sizeof sums);
  std::memcpy(&left, a, sizeof left);
  std::memcpy(&right, b, sizeof right);
  sums = _mm512_dpbf16_ps(sums, left, right);
  std::memcpy(c, &sums, sizeof sums);
}

// to = a and, behind them, b, each rounded.
EXPORT void round_both(void* to, const float* a, const float* b) {
  __m512 first, second;
  std::memcpy(&first, a, sizeof first);
  std::memcpy(&second, b, sizeof second);
  const __m512bh rounded = _mm512_cvtne2ps_pbh(second, first);
  std::memcpy(to, &rounded, sizeof rounded);
}
