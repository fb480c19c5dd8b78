// Queries, keys and values of a decoder layer's attention heads, after the layer's product `qkv`: norms and rotary positions.
#pragma once

#include <cstdint>
#include <cstring>

#include "model.h"
#include "rows.h"

namespace penstock {

// Returns the number of key heads for which `qkv` has rows.
inline int64_t num_own_keys(const Layer& layer) { return layer.shares != 0 ? 0 : layer.num_kv_heads; }

// Applies a layer's norms to the queries and keys in `x`, an output row of `qkv`.
inline void norm_heads(const Model& m, const Layer& l, float* x) {
  const int64_t size = l.head_size, num_keys = num_own_keys(l);
  if (m.norms_all_heads) {
    apply_norm(m, x, l.query_norm, x, l.num_heads * size);
    float* keys = x + l.num_heads * size;
    if (num_keys > 0) apply_norm(m, keys, l.key_norm, keys, num_keys * size);
    return;
  }
  for (int64_t head = 0; head < l.num_heads + num_keys; ++head) {
    const float* weight = head < l.num_heads ? l.query_norm : l.key_norm;
    if (weight != nullptr) apply_norm(m, x + head * size, weight, x + head * size, size);
  }
}

// Applies norms and rotary positions to the queries, keys and values in `x`, an output row of `qkv` for a token at `position`, an
// index of rows of the rotary embedding.
inline void finish_heads(const Model& m, const Layer& l, const Rotary& rotary, int64_t position, float* x) {
  const int64_t size = l.head_size, num_keys = num_own_keys(l) * size;
  const int64_t keys = l.num_heads * size, values = keys + num_keys;
  const float *cosines = rotary.cosines + position * rotary.size, *sines = rotary.sines + position * rotary.size;
  if (l.keys_as_values) std::memcpy(x + values, x + keys, num_keys * sizeof(float));
  if (l.norms_values)
    for (int64_t from = values; from < values + num_keys; from += size) rms_norm(x + from, nullptr, x + from, size, m.eps);
  if (!m.norms_rotated) norm_heads(m, l, x);
  for (int64_t from = 0; from < values; from += size) (m.pairs ? rotate_pairs : rotate)(x + from, cosines, sines, rotary.size);
  if (m.norms_rotated) norm_heads(m, l, x);
  if (rotary.query_scales == nullptr) return;
  const float scale = rotary.query_scales[position];
  for (int64_t i = 0; i < keys; ++i) x[i] *= scale;
}

}  // namespace penstock
