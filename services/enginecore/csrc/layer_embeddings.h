// Embeddings of token ids: rows of the table of embeddings, and embeddings that each layer adds to its output ("per-layer
// embeddings", see LayerEmbedding in model.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "buffer.h"
#include "gemm.h"
#include "model.h"
#include "rows.h"

namespace penstock {

// Calls `put` with the index and the value of each of `n` elements of a table, from the table's element `from` on. The elements are
// floats or bfloat16.
template <class Put>
void each_element(const void* table, int64_t kind, int64_t from, int64_t n, const Put& put) {
  if (kind == kFloat32) {
    const float* row = static_cast<const float*>(table) + from;
    for (int64_t i = 0; i < n; ++i) put(i, row[i]);
    return;
  }
  const uint16_t* row = static_cast<const uint16_t*>(table) + from;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(row[i]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    put(i, value);
  }
}

// Writes the embedding of a token of a step, `n` floats, to `to`.
inline void embed_token(const Step& step, int64_t token, int64_t n, float* to) {
  const float scale = step.embedding_scale;
  if (step.embedding_kind != kPackedRows)
    return each_element(step.embedding, step.embedding_kind, step.token_ids[token] * n, n,
                        [to, scale](int64_t i, float value) { to[i] = value * scale; });
  unpack_row(*static_cast<const Linear*>(step.embedding), step.token_ids[token], to);
  for (int64_t i = 0; i < n; ++i) to[i] *= scale;
}

// Inputs of the layers' embeddings for a step's tokens, and the computation of the additions. Layers run one after the other and
// use the same memory.
class LayerEmbeddings {
 public:
  explicit LayerEmbeddings(const Model& model)
      : of_(model.layer_inputs), num_layers_(model.num_layers), activation_(model.activation) {}

  bool exist() const { return of_.size > 0; }

  void resize(int64_t tokens) {
    if (exist()) inputs_.resize(tokens, num_layers_ * of_.size), gates_.resize(tokens, of_.size);
  }

  // Returns where `projection` of LayerInputs writes its sums.
  Output inputs_output() const { return {inputs_.data(), inputs_.stride(), of_.projection.bias, of_.projection.n, Epilogue::kStore}; }

  // Completes the inputs of a token after the product with `projection`: norms them, and adds the token's row of the table.
  void complete(const LayerRows& rows, int64_t token) const {
    const int64_t size = of_.size, width = num_layers_ * size;
    const float scale = rows.scale;
    float* inputs = inputs_.row(token);
    for (int64_t from = 0; from < width; from += size) rms_norm(inputs + from, of_.norm, inputs + from, size, of_.eps);
    each_element(rows.table, rows.kind, rows.ids[token] * width, width,
                 [inputs, scale](int64_t i, float value) { inputs[i] += value * scale; });
  }

  // Returns where the product `gate` of a layer writes its sums.
  Output gate_output(const LayerEmbedding& of) const { return {gates_.data(), gates_.stride(), of.gate.bias, of.gate.n, Epilogue::kStore}; }
  const Buffer& gates() const { return gates_; }

  // Applies the activation to row `row` of the gates, and multiplies it by the inputs of `token` for a layer.
  void multiply(size_t layer, int64_t token, int64_t row) const {
    float* gates = gates_.row(row);
    const float* inputs = inputs_.row(token) + static_cast<int64_t>(layer) * of_.size;
    each_vector(gates, of_.size, [this](vf v) { return activation_ == kGeluGate ? gelu(v) : silu(v); });
    for (int64_t i = 0; i < of_.size; ++i) gates[i] *= inputs[i];
  }

 private:
  const LayerInputs of_;
  const int64_t num_layers_, activation_;
  Buffer inputs_;  // [tokens, layers, size]
  Buffer gates_;   // [tokens, size]
};

}  // namespace penstock
