// Weights of a row for the keys of a tile. They are computed from scores, as powers of two relative to a peak.
// A scaled score is the binary logarithm of a weight. The peak is the score that has weight 1. At first, the peak is the largest
// score of the row's first tile. If a later score exceeds the peak by more than kLeeway, that score becomes the new peak, and the
// sums are rescaled. For most tiles, only the largest score must therefore be compared. A row's weights depend only on the row's
// own scores, in order.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention_tiles.h"
#include "model.h"
#include "vec.h"

namespace penstock {

constexpr float kLeeway = 8.0f;

// Makes `best`, the largest element of a vector, the score with weight 1.
inline void raise_peak(Sums& sums, int64_t row, vf best, int64_t value_size) {
  const float before = sums.peak[row], peak = largest(best);
  sums.peak[row] = peak;
  if (before == -INFINITY) return;  // no sums to rescale yet
  const vf shrink = power_of_two(kPowers5, splat(before - peak));
  sums.total[row] *= shrink;
  for (int64_t d = 0; d < value_size; d += kLanes) store(sums.output[row] + d, load(sums.output[row] + d) * shrink);
}

// Scales and caps the scores of a row in place.
inline void scale_scores(float* scores, const Params& params) {
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    const vf x = load(scores + j) * splat(params.scaling);
    store(scores + j, params.softcap != 0.0f ? capped(x, params.softcap) : x);
  }
}

// Replaces scores of masked keys.
inline void mask_scores(float* scores, const Span& seen) {
  const vi from = static_cast<int32_t>(seen.from) - vi{}, to = static_cast<int32_t>(seen.to) - vi{};
  vi key = lanes();
  for (int64_t j = 0; j < kKeys; j += kLanes, key += kLanes)
    if (j < seen.from || j + kLanes > seen.to) store(scores + j, (key >= from) & (key < to) ? load(scores + j) : splat(-INFINITY));
}

// Replaces scores by weights, for row `row` of the task, which is row `at` of the scratch memory. `seen` is the range of visible
// keys of the tile, at least one key.
template <class Tiles>
void weigh(Scratch& s, int64_t row, int64_t at, const Span& seen, const Params& params, int64_t value_size) {
  float* scores = s.weights[at];
  const bool scaled = params.softcap != 0.0f || params.scaling <= 0.0f;  // otherwise scaling keeps the order of scores
  const vf scale = splat(scaled ? kLog2E : params.scaling * kLog2E);
  if (scaled) scale_scores(scores, params);
  if (seen.from > 0 || seen.to < kKeys) mask_scores(scores, seen);
  vf x[kTileVectors], best = splat(-INFINITY);
  for (int v = 0; v < kTileVectors; ++v) {
    x[v] = load(scores + v * kLanes);
    best = max(x[v], best);  // ignores NaN
  }
  Sums& sums = s.part;
  best *= scale;
  if (any_greater(best, splat(sums.peak[row] + kLeeway))) raise_peak(sums, row, best, value_size);
  const float peak = sums.peak[row];
  if (peak == -INFINITY) {  // no score is finite
    for (int v = 0; v < kTileVectors; ++v) x[v] = x[v] == splat(-INFINITY) ? vf{} : splat(NAN);
  } else {
    for (int v = 0; v < kTileVectors; ++v) x[v] = Tiles::power(x[v] * scale - splat(peak));
  }
  sums.total[row] = Tiles::take_weights(s, at, x, sums.total[row]);
}

}  // namespace penstock
