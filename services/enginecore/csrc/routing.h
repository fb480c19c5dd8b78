// Choice of a token's experts by the logits of a router.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vec.h"

namespace penstock {

constexpr int64_t kMaxExperts = 1024;

// Selects the `top` largest of `n` logits. If logits are equal, the first is selected. The weights of the selected experts are the
// softmax over all logits. If `normalize` is true, these weights are divided by their sum. If a logit is NaN, all weights are NaN.
inline void route_row(const float* logits, int64_t n, int64_t top, bool normalize, int64_t* experts, float* weights) {
  float exponentials[kMaxExperts + kLanes];
  float peak = -INFINITY;
  for (int64_t i = 0; i < n; ++i) peak = std::max(peak, logits[i]);
  float total = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    float some[kLanes];
    const int64_t count = std::min<int64_t>(kLanes, n - i);
    for (int64_t j = 0; j < kLanes; ++j) some[j] = j < count ? logits[i + j] : -INFINITY;
    const vf distance = load(some) - splat(peak);
    store(exponentials + i, exponential(distance) + (distance == splat(-INFINITY) ? vf{} : distance - distance));
    for (int64_t j = 0; j < count; ++j) total += exponentials[i + j];
  }
  bool taken[kMaxExperts] = {};
  for (int64_t place = 0; place < top; ++place) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i)
      if (!taken[i] && (best < 0 || logits[i] > logits[best] || (logits[i] == logits[i] && logits[best] != logits[best]))) best = i;
    taken[best] = true;
    experts[place] = best;
    weights[place] = exponentials[best] / total;
  }
  if (!normalize) return;
  float sum = 0;
  for (int64_t place = 0; place < top; ++place) sum += weights[place];
  for (int64_t place = 0; place < top; ++place) weights[place] /= sum;
}

}  // namespace penstock
