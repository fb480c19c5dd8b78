// Choice of a token's experts by the logits of a router.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "model.h"
#include "vec.h"

namespace penstock {

constexpr int64_t kMaxExperts = 1024;

// Returns the number of experts that compute a token.
inline int64_t num_places(const Routing& routing) { return routing.top + (routing.shared != kNoShared); }

// Returns the number of experts, including the shared expert.
inline int64_t all_experts(const Routing& routing) { return routing.num_experts + (routing.shared != kNoShared); }

// Writes the results of `change` for the vectors of `from` [n] to `to`, in whole vectors. The last vector of `from` is filled up with
// `filling`.
template <class Change>
void change_vectors(const float* from, int64_t n, float filling, float* to, const Change& change) {
  for (int64_t i = 0; i < n; i += kLanes) {
    float some[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) some[j] = i + j < n ? from[i + j] : filling;
    store(to + i, change(load(some)));
  }
}

// Writes the exponentials of the logits' distances from the largest logit to `scores`. Returns the sum of these exponentials, by
// which the scores must be divided. If a logit is NaN, the sum is NaN.
inline float softmax_scores(const float* logits, int64_t n, float* scores) {
  float peak = -INFINITY;
  for (int64_t i = 0; i < n; ++i) peak = std::max(peak, logits[i]);
  change_vectors(logits, n, -INFINITY, scores, [peak](vf x) {
    const vf distance = x - splat(peak);
    return exponential(distance) + (distance == splat(-INFINITY) ? vf{} : distance - distance);
  });
  float total = 0;
  for (int64_t i = 0; i < n; ++i) total += scores[i];
  return total;
}

// Writes the logistic function of the logits to `scores`. Returns 1, by which the scores must be divided, or NaN if a logit is NaN.
inline float logistic_scores(const float* logits, int64_t n, float* scores) {
  change_vectors(logits, n, 0.0f, scores, [](vf x) { return splat(1.0f) / (splat(1.0f) + exponential(-x)); });
  bool any = false;
  for (int64_t i = 0; i < n; ++i) any = any || logits[i] != logits[i];
  return any ? NAN : 1.0f;
}

// Returns the index of the largest of `n` values that is not `taken`, and marks it as taken. If values are equal, this is the first.
// NaN is taken last.
inline int64_t take_largest(const float* values, int64_t n, bool* taken) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i)
    if (!taken[i] && (best < 0 || values[i] > values[best] || (values[i] == values[i] && values[best] != values[best]))) best = i;
  taken[best] = true;
  return best;
}

// Marks the experts as taken that are not in the `kept` best groups. `values` has the values by which experts are chosen.
inline void take_other_groups(const Routing& routing, const float* values, bool* taken) {
  const int64_t size = routing.num_experts / routing.groups;
  float of_groups[kMaxExperts];
  for (int64_t group = 0; group < routing.groups; ++group) {
    const float* from = values + group * size;
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < size; ++i) {
      if (from[i] > first) second = first, first = from[i];
      else second = std::max(second, from[i]);
    }
    of_groups[group] = routing.correction != nullptr ? first + second : first;
  }
  bool kept[kMaxExperts] = {};
  for (int64_t i = 0; i < routing.kept; ++i) take_largest(of_groups, routing.groups, kept);
  for (int64_t i = 0; i < routing.num_experts; ++i) taken[i] = !kept[i / size];
}

// Chooses the experts of a token, and writes their indices and weights to `experts` and `weights` (see Routing). If a logit is NaN,
// all weights of chosen experts are NaN.
inline void route_row(const Routing& routing, const float* logits, int64_t* experts, float* weights) {
  const int64_t n = routing.num_experts, top = routing.top;
  float scores[kMaxExperts + kLanes], corrected[kMaxExperts];
  const float divisor = (routing.scoring == kSoftmax ? softmax_scores : logistic_scores)(logits, n, scores);
  const float* values = logits;  // larger logits have larger scores, and differ more
  if (routing.correction != nullptr) {
    for (int64_t i = 0; i < n; ++i) corrected[i] = scores[i] + routing.correction[i];
    values = corrected;
  }
  bool taken[kMaxExperts] = {};
  if (routing.groups > 1) take_other_groups(routing, values, taken);
  for (int64_t place = 0; place < top; ++place) {
    experts[place] = take_largest(values, n, taken);
    weights[place] = scores[experts[place]] / divisor;
  }
  if (routing.normalize) {
    float sum = 0;
    for (int64_t place = 0; place < top; ++place) sum += weights[place];
    for (int64_t place = 0; place < top; ++place) weights[place] /= sum;
  }
  for (int64_t place = 0; place < top; ++place) {
    weights[place] *= routing.factor;
    if (routing.scales != nullptr) weights[place] *= routing.scales[experts[place]];
  }
  if (routing.shared == kNoShared) return;
  experts[top] = n;
  weights[top] = 1;
  if (routing.shared == kGatedShared) {
    const float nan_or_one = logistic_scores(logits + n, 1, scores);
    weights[top] = scores[0] / nan_or_one;
  }
}

}  // namespace penstock
