// Functions on rows of floats: norms, rotary embedding, soft cap, activations and gates.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "model.h"
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

// Applies a norm to `x`. `weight` is null for a norm without weights.
inline void rms_norm(const float* x, const float* weight, float* out, int64_t n, float eps) {
  const float scale = rms_scale(x, n, eps);
  if (weight == nullptr) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale;
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(weight + i) * (load(x + i) * splat(scale)));
  for (; i < n; ++i) out[i] = weight[i] * (x[i] * scale);
}

// Mean of a row, and the factor that gives the row without its mean a variance of 1.
struct Centered {
  Centered(const float* x, int64_t n, float eps) {
    vf sums{}, squares{};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) sums += load(x + i);
    mean = sum(sums);
    for (; i < n; ++i) mean += x[i];
    mean /= static_cast<float>(n);
    for (i = 0; i + kLanes <= n; i += kLanes) squares += (load(x + i) - splat(mean)) * (load(x + i) - splat(mean));
    float total = sum(squares);
    for (; i < n; ++i) total += (x[i] - mean) * (x[i] - mean);
    scale = 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
  }
  float mean, scale;
};

// LayerNorm. `weight` has the weights [n] and then the biases [n].
inline void layer_norm(const float* x, const float* weight, float* out, int64_t n, float eps) {
  const Centered of(x, n, eps);
  const float* bias = weight + n;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    store(out + i, load(weight + i) * ((load(x + i) - splat(of.mean)) * splat(of.scale)) + load(bias + i));
  for (; i < n; ++i) out[i] = weight[i] * ((x[i] - of.mean) * of.scale) + bias[i];
}

// Applies a norm of the model `m` to `x`.
inline void apply_norm(const Model& m, const float* x, const float* weight, float* out, int64_t n) {
  (m.centers ? layer_norm : rms_norm)(x, weight, out, n, m.eps);
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

// Applies a rotary embedding in place, with which neighbouring elements x and y are rotated together. Neighbouring cosines are
// equal, and neighbouring sines too.
inline void rotate_pairs(float* x, const float* cosines, const float* sines, int64_t size) {
  const vf signs = __builtin_convertvector((lanes() & 1) * 2 - 1, vf);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const vf a = load(x + i), b = exchanged<1>(a, std::make_integer_sequence<int, kLanes>{});
    store(x + i, a * load(cosines + i) + b * (load(sines + i) * signs));
  }
  for (; i < size; i += 2) {
    const float a = x[i], b = x[i + 1];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + 1] = b * cosines[i + 1] + a * sines[i + 1];
  }
}

// Replaces each vector of `x` by the result of `change`, in place. The last vector may be partial.
template <class Change>
void each_vector(float* x, int64_t n, const Change& change) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, change(load(x + i)));
  if (i == n) return;
  float last[kLanes] = {};
  std::memcpy(last, x + i, (n - i) * sizeof(float));
  store(last, change(load(last)));
  std::memcpy(x + i, last, (n - i) * sizeof(float));
}

// Replaces each element x by cap tanh(x / cap), in place.
inline void cap(float* x, int64_t n, float cap) {
  each_vector(x, n, [cap](vf v) { return capped(v, cap); });
}

// Applies an activation without a gate, in place. NaN stays NaN.
inline void activate(float* x, int64_t n, int64_t activation) {
  const auto positive = [](vf v) { return v > vf{} ? v : vf{} * v; };
  if (activation == kSquaredRelu) each_vector(x, n, [&](vf v) { return positive(v) * positive(v); });
  else if (activation == kRelu) each_vector(x, n, positive);
  else if (activation == kGelu) each_vector(x, n, gelu);
  else each_vector(x, n, exact_gelu);
}

// Multiplies each element of `x` by the logistic function of the same element of `gate`.
inline void multiply_logistic(float* x, const float* gate, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) / (splat(1.0f) + exponential(-load(gate + i))));
  for (; i < n; ++i) x[i] /= 1.0f + std::exp(-gate[i]);
}

}  // namespace penstock
