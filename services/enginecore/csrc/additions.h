// Additions of the outputs of attention and MLP to the hidden states.
#pragma once

#include <cstdint>

#include "model.h"
#include "rows.h"

namespace penstock {

// Change of an output of attention or MLP before the addition to the hidden states: a norm, or a factor. After the addition, the
// hidden states are multiplied by `scale`.
struct Change {
  bool changes() const { return norm != nullptr || factor != 1.0f || scale != 1.0f; }
  const float* norm = nullptr;
  float factor = 1.0f;
  float scale = 1.0f;
};

inline Change after_attention(const Layer& layer) { return {layer.attention_out_norm, layer.attention_factor, 1.0f}; }
inline Change after_embedding(const Layer& layer) { return {layer.embedding.norm, 1.0f, layer.scale}; }
inline Change after_mlp(const Layer& layer) {
  return {layer.mlp_out_norm, layer.mlp_factor, layer.embedding.gate.n > 0 ? 1.0f : layer.scale};
}

// Adds `from` [n] to `to`, with the changes `after`. `centers` and `eps` describe the norm, as in Model.
inline void add_changed(float* to, const float* from, int64_t n, const Change& after, bool centers, float eps) {
  const float *norm = after.norm, factor = after.factor;
  if (!after.changes()) {
    for (int64_t i = 0; i < n; ++i) to[i] += from[i];
  } else if (norm == nullptr) {
    for (int64_t i = 0; i < n; ++i) to[i] += factor * from[i];
  } else if (centers) {
    const Centered of(from, n, eps);
    for (int64_t i = 0; i < n; ++i) to[i] += norm[i] * ((from[i] - of.mean) * of.scale) + norm[n + i];
  } else {
    const float scale = rms_scale(from, n, eps);
    for (int64_t i = 0; i < n; ++i) to[i] += norm[i] * (from[i] * scale);
  }
  if (after.scale != 1.0f)
    for (int64_t i = 0; i < n; ++i) to[i] *= after.scale;
}

}  // namespace penstock
