// Softmax weights of a row for the keys of a tile. A weight is two to the power of the scaled score minus a peak.
// The peak is the scaled score that gets weight 1. At first, the peak is the largest score of the row's first tile. If the largest
// score of a later tile exceeds the peak by more than kLeeway, it becomes the new peak, and the sums are rescaled. For most tiles,
// a comparison of the largest score with the peak is therefore enough. A row's weights depend only on the row's own scores, in
// order.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention_tiles.h"
#include "model.h"
#include "vec.h"

namespace penstock {

constexpr float kLeeway = 8.0f;

// Makes the largest element of the vector `best` the peak, and rescales the sums of the row.
inline void raise_peak(Sums& sums, int64_t row, vf best, int64_t value_size) {
  const float before = sums.peak[row], peak = largest(best);
  sums.peak[row] = peak;
  if (before == -INFINITY) return;  // the row has no sums yet
  const vf shrink = power_of_two(kPowers5, splat(before - peak));
  sums.total[row] *= shrink;
  for (int64_t d = 0; d < value_size; d += kLanes) store(sums.output[row] + d, load(sums.output[row] + d) * shrink);
}

// Multiplies the scores of a row by the scaling factor and applies the soft cap, in place.
inline void scale_scores(float* scores, const Params& params) {
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    const vf x = load(scores + j) * splat(params.scaling);
    store(scores + j, params.softcap != 0.0f ? capped(x, params.softcap) : x);
  }
}

// Replaces the scores of keys outside of `seen`, which are masked, by -infinity.
inline void mask_scores(float* scores, const Span& seen) {
  const vi from = static_cast<int32_t>(seen.from) - vi{}, to = static_cast<int32_t>(seen.to) - vi{};
  vi key = lanes();
  for (int64_t j = 0; j < kKeys; j += kLanes, key += kLanes)
    if (j < seen.from || j + kLanes > seen.to) store(scores + j, (key >= from) & (key < to) ? load(scores + j) : splat(-INFINITY));
}

// Replaces the scores of row `row` of the task by weights. The scores are in row `at` of the scratch memory. `seen` is the range of
// the tile's keys that are visible to the row, at least one key.
template <class Tiles>
void weigh(Scratch& s, int64_t row, int64_t at, const Span& seen, const Params& params, int64_t value_size) {
  float* scores = s.weights[at];
  const bool scaled = params.softcap != 0.0f || params.scaling <= 0.0f;  // otherwise scaling keeps the largest score largest
  const vf scale = splat(scaled ? kLog2E : params.scaling * kLog2E);
  if (scaled) scale_scores(scores, params);
  if (seen.from > 0 || seen.to < kKeys) mask_scores(scores, seen);
  vf x[kTileVectors], best = splat(-INFINITY);
  for (int v = 0; v < kTileVectors; ++v) {
    x[v] = load(scores + v * kLanes);
    best = max(x[v], best);  // the maximum ignores NaN
  }
  Sums& sums = s.part;
  best *= scale;
  if (any_greater(best, splat(sums.peak[row] + kLeeway))) raise_peak(sums, row, best, value_size);
  const float peak = sums.peak[row];
  if (peak == -INFINITY) {  // no score of the row is finite so far
    for (int v = 0; v < kTileVectors; ++v) x[v] = x[v] == splat(-INFINITY) ? vf{} : splat(NAN);
  } else {
    for (int v = 0; v < kTileVectors; ++v) x[v] = Tiles::power(x[v] * scale - splat(peak));
  }
  sums.total[row] = Tiles::take_weights(s, at, x, sums.total[row]);
}

}  // namespace penstock
