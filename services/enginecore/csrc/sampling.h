// Choice of the most likely token of each row of logits, random sampling without filters, and grammar masks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "model.h"
#include "vec.h"

namespace penstock {

constexpr int64_t kBlock = 256;  // number of columns in a block; sampling finds the block first, then the column in the block

typedef double vd __attribute__((vector_size(PENSTOCK_LANES * 8)));

// Finds the largest element of a row and the first column with this element. NaN counts as largest.
inline void find_peak(const float* row, int64_t width, float* peak, int64_t* column) {
  vf best[4];
  for (vf& b : best) b = splat(-INFINITY);
  bool ordered = true;
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    vi same{};
    for (int v = 0; v < 4; ++v) {
      const vf x = load(row + i + v * kLanes);
      same |= x != x;
      best[v] = max(x, best[v]);
    }
    for (int lane = 0; lane < kLanes; ++lane) ordered &= same[lane] == 0;
  }
  float value = largest(max(max(best[0], best[1]), max(best[2], best[3])));
  for (; i < width; ++i) {
    ordered &= row[i] == row[i];
    value = std::max(value, row[i]);
  }
  int64_t at = 0;
  if (ordered) while (at + 1 < width && row[at] != value) ++at;
  else while (at + 1 < width && row[at] == row[at]) ++at;
  *peak = row[at];
  *column = at;
}

// Computes the weights of logits, relative to the weight of the largest logit. Tokens with logits of -infinity must get a weight of
// exactly zero.
inline vf weights(vf x, float peak, float temperature) {
  const vf distance = (x - splat(peak)) / splat(temperature);
  return distance < splat(-87.0f) ? splat(0.0f) : exponential(distance);
}

inline float weight(float x, float peak, float temperature) { return weights(splat(x), peak, temperature)[0]; }

inline double block_weight(const float* row, int64_t from, int64_t to, float peak, float temperature) {
  vd sums{};
  int64_t i = from;
  for (; i + kLanes <= to; i += kLanes) sums += __builtin_convertvector(weights(load(row + i), peak, temperature), vd);
  double sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  for (; i < to; ++i) sum += weight(row[i], peak, temperature);
  return sum;
}

// Returns the column at which the cumulative distribution of a row reaches `uniform`, like `draw` in sample/filters.py.
inline int64_t draw(const float* row, int64_t width, float peak, float temperature, double uniform, double* sums) {
  const int64_t blocks = (width + kBlock - 1) / kBlock;
  double all = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    all += block_weight(row, b * kBlock, std::min(width, (b + 1) * kBlock), peak, temperature);
    sums[b] = all;
  }
  const double target = std::min(uniform * all, std::nextafter(all, 0.0));
  const int64_t block = std::min<int64_t>(std::upper_bound(sums, sums + blocks, target) - sums, blocks - 1);
  double before = block > 0 ? sums[block - 1] : 0.0;
  int64_t last = block * kBlock;
  for (int64_t i = block * kBlock; i < std::min(width, (block + 1) * kBlock); ++i) {
    const float w = weight(row[i], peak, temperature);
    if (w > 0) last = i;
    before += w;
    if (before > target) return i;
  }
  return last;
}

// Replaces the logits of tokens whose bits are not set by -infinity, in place. NaN is not replaced, so that later checks detect it.
inline void mask_row(const Mask& m, int64_t i) {
  constexpr int64_t kBits = 32;
  static_assert(kBits % kLanes == 0);
  float* row = m.logits + m.rows[i] * m.width;
  vu lane{};
  for (int l = 0; l < kLanes; ++l) lane[l] = static_cast<uint32_t>(l);
  for (int64_t w = 0; w < m.words && w * kBits < m.width; ++w) {
    const uint32_t word = m.bits[i * m.words + w];
    if (word == UINT32_MAX) continue;
    float* at = row + w * kBits;
    const int64_t width = std::min(kBits, m.width - w * kBits);
    int64_t t = 0;
    for (; t + kLanes <= width; t += kLanes) {
      const vu bits = ((word >> t) - vu{}) >> lane;
      const vf x = load(at + t);
      const vi stays = reinterpret_cast<vi>((bits & 1) != 0) | (x != x);
      store(at + t, stays ? x : splat(-INFINITY));
    }
    for (; t < width; ++t)
      if (!(word >> t & 1) && at[t] == at[t]) at[t] = -INFINITY;
  }
}

inline void sample_row(const Sampling& s, int64_t row, std::vector<double>& sums) {
  const float* logits = s.logits + row * s.width;
  find_peak(logits, s.width, s.peaks + row, s.columns + row);
  if (s.temperatures[row] > 0 && std::isfinite(s.peaks[row])) {
    sums.resize((s.width + kBlock - 1) / kBlock);
    s.columns[row] = draw(logits, s.width, s.peaks[row], s.temperatures[row], s.uniforms[row], sums.data());
  }
}

}  // namespace penstock
