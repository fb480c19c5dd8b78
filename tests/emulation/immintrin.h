// The intrinsics that the kernels use, of matrix units above all, in plain C++: the compiler's own header where this folder comes
// first among those of includes, so that the kernels' very text runs on any processor.
//
// Each does what the operation of its instruction says in Intel's manual: products and sums are fused and rounded to nearest even,
// numbers too small to be normal count as zero and become it, in and out. What a processor refuses ends the process with a message.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#pragma GCC push_options
#pragma GCC optimize("O3")  // alone in what is otherwise compiled to be compiled fast

namespace emulated {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Tile {
  int rows = 0;
  int row_bytes = 0;
  alignas(kRowBytes) uint8_t bytes[kRows][kRowBytes] = {};
};

struct Unit {
  bool configured = false;
  Tile tiles[kTiles];
};

inline thread_local Unit unit;

inline void require(bool holds, const char* otherwise) {
  if (holds) return;
  std::fprintf(stderr, "emulated matrix unit: %s\n", otherwise);
  std::abort();
}

inline Tile& tile(int index) {
  require(unit.configured, "no configuration is loaded");
  require(index >= 0 && index < kTiles, "there is no such tile");
  require(unit.tiles[index].rows > 0, "the tile is not configured");
  return unit.tiles[index];
}

inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

inline float widened(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return flushed(wide);
}

}  // namespace emulated

inline void _mm_pause() {}

typedef float __m512 __attribute__((vector_size(64)));
typedef short __m512bh __attribute__((vector_size(64)));

// The second of two of which one is no number.
inline __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }

constexpr int _CMP_GT_OQ = 30;

// A bit for each lane, of the one comparison that the kernels make.
inline uint16_t _mm512_cmp_ps_mask(__m512 a, __m512 b, int comparison) {
  emulated::require(comparison == _CMP_GT_OQ, "there is no such comparison");
  uint16_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (a[i] > b[i]) << i;
  return mask;
}

// A lane adds the product of the second numbers of a pair to its sum, then that of the first.
inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  using namespace emulated;
  uint16_t left[32], right[32];
  std::memcpy(left, &a, sizeof left);
  std::memcpy(right, &b, sizeof right);
  for (int i = 0; i < 16; ++i) {
    const float second = flushed(std::fma(widened(left[2 * i + 1]), widened(right[2 * i + 1]), flushed(sums[i])));
    sums[i] = flushed(std::fma(widened(left[2 * i]), widened(right[2 * i]), second));
  }
  return sums;
}

// Those of `b`, rounded to nearest even, then those of `a`.
inline __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
  uint16_t to[32];
  for (int i = 0; i < 32; ++i) {
    const float x = i < 16 ? b[i] : a[i - 16];
    const float kept = emulated::flushed(x);
    uint32_t bits;
    std::memcpy(&bits, &kept, sizeof bits);
    to[i] = static_cast<uint16_t>((x == x ? bits + 0x7FFFu + (bits >> 16 & 1u) : bits | 0x400000u) >> 16);
  }
  __m512bh out;
  std::memcpy(&out, to, sizeof out);
  return out;
}

inline void _tile_release() { emulated::unit = {}; }

inline void _tile_loadconfig(const void* config) {
  using namespace emulated;
  uint8_t bytes[64];
  std::memcpy(bytes, config, sizeof bytes);
  _tile_release();
  if (bytes[0] == 0) return;
  require(bytes[0] == 1, "the palette is none that there is");
  for (int i = 1; i < 16; ++i) require(bytes[i] == 0, "a reserved byte of the configuration is not 0");
  for (int i = 0; i < 16; ++i) {
    const int rows = bytes[48 + i], row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
    require(i < kTiles || (rows == 0 && row_bytes == 0), "a tile that there is not has a shape");
    require(rows <= kRows && row_bytes <= kRowBytes, "a tile is larger than the unit has them");
    require((rows == 0) == (row_bytes == 0), "a tile has rows without bytes, or bytes without rows");
    if (i < kTiles) unit.tiles[i].rows = rows, unit.tiles[i].row_bytes = row_bytes;
  }
  unit.configured = true;
}

inline void _tile_zero(int to) { std::memset(emulated::tile(to).bytes, 0, sizeof(emulated::Tile::bytes)); }

inline void _tile_loadd(int to, const void* base, int64_t stride) {
  emulated::Tile& tile = emulated::tile(to);
  std::memset(tile.bytes, 0, sizeof tile.bytes);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.bytes[row], static_cast<const uint8_t*>(base) + row * stride, tile.row_bytes);
}

inline void _tile_stored(int from, void* base, int64_t stride) {
  const emulated::Tile& tile = emulated::tile(from);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(static_cast<uint8_t*>(base) + row * stride, tile.bytes[row], tile.row_bytes);
}

// Of each row of `a`, pairs of bfloat16, and column of `b`: the first of all pairs in order, and the second, are summed by
// themselves, from zero; then the one sum is added to the other, and both to `to`.
inline void _tile_dpbf16ps(int to, int a, int b) {
  using namespace emulated;
  Tile &sums = tile(to), &left = tile(a), &right = tile(b);
  require(to != a && to != b && a != b, "a product takes three tiles");
  require(sums.rows == left.rows && sums.row_bytes == right.row_bytes && left.row_bytes == 4 * right.rows,
          "the shapes of a product's tiles do not fit");
  constexpr int kColumns = kRowBytes / 4;
  const int columns = sums.row_bytes / 4;
  for (int row = 0; row < sums.rows; ++row) {
    float first[kColumns] = {}, second[kColumns] = {}, out[kColumns];
    uint16_t pairs[kRowBytes / 2];
    std::memcpy(pairs, left.bytes[row], sizeof pairs);
    std::memcpy(out, sums.bytes[row], sizeof out);
    for (int k = 0; k < right.rows; ++k) {
      const float x = widened(pairs[2 * k]), y = widened(pairs[2 * k + 1]);
      uint16_t weights[kRowBytes / 2];
      std::memcpy(weights, right.bytes[k], sizeof weights);
      for (int n = 0; n < kColumns; ++n) first[n] = flushed(std::fma(x, widened(weights[2 * n]), first[n]));
      for (int n = 0; n < kColumns; ++n) second[n] = flushed(std::fma(y, widened(weights[2 * n + 1]), second[n]));
    }
    for (int n = 0; n < columns; ++n) out[n] = flushed(flushed(out[n]) + flushed(first[n] + second[n]));
    std::memcpy(sums.bytes[row], out, sizeof out);
  }
}

#pragma GCC pop_options
