// Inputs of the first products of an EAGLE head (see Fusion in model.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "buffer.h"
#include "layer_embeddings.h"
#include "model.h"
#include "parts.h"
#include "rows.h"

namespace penstock {

// Writes the input of `fc` for a token: the token's embedding and hidden states, or only its hidden states. Hidden states that
// need no `fc` are copied to `x`. Inputs that a matrix unit needs in parts are also written to `split`.
inline void put_both(const Model& m, const Step& step, int64_t token, const Buffer& rows, const Buffer& split) {
  const Fusion& f = m.fusion;
  const int64_t n = m.hidden;
  float *both = rows.row(token), *x = step.x + token * n;
  if (step.embedding != nullptr) embed_token(step, token, n, both);
  else std::memcpy(both, x, n * sizeof(float));
  if (f.state_norm == nullptr) {
    std::memcpy(both + n, step.states + token * n, n * sizeof(float));
    if (splits(f.fc)) split_row(f.fc, both, split.row(token));
    return;
  }
  apply_norm(m, both, f.embedding_norm, both, n);
  if (step.own_states) std::memcpy(x, step.states + token * n, n * sizeof(float));
  else if (splits(f.fc)) split_row(f.fc, step.states + token * f.fc.k, split.row(token));
}

// Writes a token's normed hidden state after its normed embedding, as input of `linear`.
inline void norm_both(const Model& m, const Step& step, int64_t token, const Linear& linear, const Buffer& rows, const Buffer& split) {
  const int64_t n = m.hidden;
  float *to = rows.row(token) + n, *x = step.x + token * n;
  apply_norm(m, x, m.fusion.state_norm, to, n);
  if (m.fusion.normed_residual) std::memcpy(x, to, n * sizeof(float));
  if (splits(linear)) split_row(linear, rows.row(token), split.row(token));
}

}  // namespace penstock
