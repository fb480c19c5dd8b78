// What attention makes of the scores of a row and a tile: weights, powers of two, beside what weighs 1.
//
// A score, scaled, is the binary logarithm of a weight. What weighs 1 is the peak of the row's first tile until a score exceeds it by
// more than kLeeway; then it is that score, and what was summed up is scaled anew. So nearly all tiles need no more than a comparison of
// their largest score, and a row's weights depend on its own scores in their order, and on nothing else.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention_tiles.h"
#include "model.h"
#include "vec.h"

namespace penstock {

constexpr float kLeeway = 8.0f;

// Makes `best`, the largest number of a vector, what weighs 1.
inline void raise_peak(Sums& sums, int64_t row, vf best, int64_t value_size) {
  const float before = sums.peak[row], peak = largest(best);
  sums.peak[row] = peak;
  if (before == -INFINITY) return;  // nothing was summed up
  const vf shrink = power_of_two(kPowers5, splat(before - peak));
  sums.total[row] *= shrink;
  for (int64_t d = 0; d < value_size; d += kLanes) store(sums.output[row] + d, load(sums.output[row] + d) * shrink);
}

// Puts scaled and capped scores of a row in their place.
inline void scale_scores(float* scores, const Params& params) {
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    const vf x = load(scores + j) * splat(params.scaling);
    store(scores + j, params.softcap != 0.0f ? capped(x, params.softcap) : x);
  }
}

// Replaces scores of keys that are not seen.
inline void mask_scores(float* scores, const Span& seen) {
  const vi from = static_cast<int32_t>(seen.from) - vi{}, to = static_cast<int32_t>(seen.to) - vi{};
  vi key = lanes();
  for (int64_t j = 0; j < kKeys; j += kLanes, key += kLanes)
    if (j < seen.from || j + kLanes > seen.to) store(scores + j, (key >= from) & (key < to) ? load(scores + j) : splat(-INFINITY));
}

// Turns the scores of row `row` of the task, which are those of row `at` of the scratch, into weights: of the tile the row sees the
// keys of `seen`, one at least.
template <class Tiles>
void weigh(Scratch& s, int64_t row, int64_t at, const Span& seen, const Params& params, int64_t value_size) {
  float* scores = s.weights[at];
  const bool scaled = params.softcap != 0.0f || params.scaling <= 0.0f;  // else the largest is so after scaling, too
  const vf scale = splat(scaled ? kLog2E : params.scaling * kLog2E);
  if (scaled) scale_scores(scores, params);
  if (seen.from > 0 || seen.to < kKeys) mask_scores(scores, seen);
  vf x[kTileVectors], best = splat(-INFINITY);
  for (int v = 0; v < kTileVectors; ++v) {
    x[v] = load(scores + v * kLanes);
    best = max(x[v], best);  // passes over what is no number
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
