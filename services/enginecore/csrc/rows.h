// Functions on rows of floats: norms, rotary embedding, soft cap and gates.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vec.h"

namespace penstock {

inline float rms_scale(const float* x, int64_t n, float eps) {
  vf squares{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < n; ++i) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
}

inline void rms_norm(const float* x, const float* weight, float* out, int64_t n, float eps) {
  const float scale = rms_scale(x, n, eps);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(weight + i) * (load(x + i) * splat(scale)));
  for (; i < n; ++i) out[i] = weight[i] * (x[i] * scale);
}

// Applies a rotary embedding in place. Each element x of the first half is rotated with the element y of the second half: (x, y) ->
// (x cos - y sin, y cos + x sin).
inline void rotate(float* x, const float* cosines, const float* sines, int64_t size) {
  const int64_t half = size / 2;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const vf a = load(x + i), b = load(x + i + half);
    store(x + i, a * load(cosines + i) - b * load(sines + i));
    store(x + i + half, b * load(cosines + i + half) + a * load(sines + i + half));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + half] = b * cosines[i + half] + a * sines[i + half];
  }
}

// Replaces each element x by cap tanh(x / cap), in place.
inline void cap(float* x, int64_t n, float cap) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, capped(load(x + i), cap));
  if (i == n) return;
  float last[kLanes] = {};
  std::memcpy(last, x + i, (n - i) * sizeof(float));
  store(last, capped(load(last), cap));
  std::memcpy(x + i, last, (n - i) * sizeof(float));
}

// Replaces negative numbers by 0 and other numbers by their squares, in place.
inline void square_positive(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] > 0.0f ? x[i] * x[i] : 0.0f * x[i];  // NaN stays NaN
}

// Multiplies each element of `x` by the logistic function of the same element of `gate`.
inline void multiply_logistic(float* x, const float* gate, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) / (splat(1.0f) + exponential(-load(gate + i))));
  for (; i < n; ++i) x[i] /= 1.0f + std::exp(-gate[i]);
}

}  // namespace penstock
