// Structs of an encoder that the caller passes to the kernels. The same structs are defined in Python.
#pragma once

#include <cstdint>

#include "model.h"

namespace penstock {

// Layer of an encoder. `qkv` computes queries, keys and values of all heads, one after the other. If the model's MLP has a gate,
// `up` computes the gates of all inputs of `down`, followed by the values that the gates multiply. The norms are null in layers
// without them. `cosines` and `sines` [positions, rotary size] are null if heads are not rotated.
struct EncoderLayer {
  Linear qkv;
  Linear output;
  Linear up;
  Linear down;
  const float* attention_norm;
  const float* mlp_norm;
  Params params;
  const float* cosines;
  const float* sines;
  int64_t rotary_size;
};

// Encoder. If `post_norm` is not 0, a layer's norms are applied to its hidden states after each residual addition. Otherwise they are
// applied to the inputs of attention and MLP. Norms have the weights [hidden], and LayerNorm (`centers`) then the biases [hidden].
// `activation` is an Activation without a gate, or kSiluGate with `gated`. The embedding of a token is the sum of its rows in the
// tables `words`, `types` and `positions`, of which the last two may be null, and `embedding_norm` is then applied, unless it is null.
// `words` has floats, or bfloat16 numbers if `half_words` is not 0. If `pairs` is not 0, attention computes with bfloat16 (see attention_pairs.h).
struct EncoderModel {
  const EncoderLayer* layers;
  int64_t num_layers;
  int64_t hidden;
  int64_t intermediate;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t activation;
  int64_t gated;
  int64_t post_norm;
  int64_t centers;
  int64_t pairs;
  int64_t half_words;
  float eps;
  float embedding_eps;
  const void* words;
  const float* types;
  const float* positions;
  const float* embedding_norm;
  const float* final_norm;
};

// Texts of a step, one after the other. Text i has the tokens `starts[i]` to `starts[i + 1] - 1`. `token_ids`, `type_ids` and
// `position_ids` [tokens] are rows of the tables of embeddings. If `token_ids` is null, `x` has the embeddings. Text i's tokens attend
// to its first `num_attended[i]` tokens, or to all its tokens if `num_attended` is null. The step writes the hidden states after the
// last layer to `x` [tokens, hidden].
struct EncoderStep {
  int64_t num_tokens;
  int64_t num_texts;
  const int64_t* starts;
  const int64_t* token_ids;
  const int64_t* type_ids;
  const int64_t* position_ids;
  const int64_t* num_attended;
  float* x;
};

}  // namespace penstock
