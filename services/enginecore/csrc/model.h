// Structs that Python passes to the kernels. penstock_enginecore/native/ffi_structs.py has the same structs.
#pragma once

#include <cstdint>

namespace penstock {

constexpr int kChunk = 16;  // tokens of the KV cache that are stored together, see attention.h

// Dtypes of packed weights.
enum Kind : int64_t { kFloat32, kBfloat16, kInt8 };

// Linear layer y = x W^T + bias with `n` output features and `k` inputs. `packed` is W in panels (see gemm.h), with elements of
// `kind`. `scales` [n, whole panels] are factors of the integers of an output feature, or null for floats. `parts` is the number of
// bfloat16 values into which an input is split for a matrix unit (see parts.h), or 0 for unsplit inputs.
struct Linear {
  const void* packed;
  const float* scales;
  const float* bias;
  int64_t n;
  int64_t k;
  int64_t kind;
  int64_t parts;
};

// Part of a weight's output features that belongs to one projection: `vectors` vectors of kLanes features, the last of which may be
// partial. `b` is [vectors][rank][kLanes], or for bfloat16 [vectors][rank / 2, rounded up][kLanes][2]. It uses `rank` sums of a
// row, from `first` on.
struct Piece {
  const void* b;
  int64_t vectors;
  int64_t first;
  int64_t rank;
};

// LoRA update of a product with a weight of `k` inputs. A `rank` of 0 means no update.
//
// `a` has the rows of all projections, `a_stride` elements each, padded with zeros to whole pairs of vectors. Rows are stored in
// groups of four; the last group may have fewer: [rank / 4][a_stride / 2 kLanes][4][2 kLanes]. For bfloat16 it is
// [..][4][kLanes][2], where the second elements are the inputs one vector later. If `interleaved` is not 0, vectors of the two
// pieces, which have equal sizes, alternate. Otherwise the pieces follow one another.
struct Update {
  const void* a;
  int64_t a_stride;
  int64_t a_kind;
  int64_t b_kind;
  int64_t k;
  int64_t rank;
  int64_t interleaved;
  int64_t num_pieces;
  Piece pieces[3];
};

// Rows `first` to before `end` that have an adapter. `updates` are those of qkv, output, gate_up and down of each layer, then of
// the head. `width` is their largest rank.
struct Segment {
  const Update* updates;
  int64_t first;
  int64_t end;
  int64_t width;
};

// Products of groups of rows with different weights: rows `ends[g - 1]` to `ends[g]` by `linears[g]`. All weights have the same
// `n`, `k`, `kind` and `parts`. `from` [rows] gives the row of `x` with a row's inputs, or is null if rows are in order. If `silu`
// is not 0, rows of gate and up alternate in the weights in groups of one vector's lanes, there are no biases, and `out` is
// silu(gate) * up.
struct Grouped {
  int64_t num_groups;
  const Linear* linears;
  const int64_t* ends;
  const int64_t* from;
  const float* x;
  int64_t stride;
  float* out;
  int64_t out_stride;
  int64_t silu;
};

// Keys and values of a layer: `num_slots` rows with strides of `key_stride` and `value_stride` elements. They are floats, or
// bfloat16 if `pairs` is not 0.
struct Cache {
  void* keys;
  void* values;
  int64_t key_stride;
  int64_t value_stride;
  int64_t pairs;
};

// Attention parameters. A `window`, `chunk` or `softcap` of 0 means none. `sinks` is [heads] or null.
struct Params {
  int64_t window;
  int64_t chunk;
  float scaling;
  float softcap;
  const float* sinks;
};

// Activations of a gate before it is multiplied by up. kGelu is the tanh approximation.
enum Activation : int64_t { kSiluGate, kGeluGate };

// Mixture of experts whose gate and up rows alternate. A token uses the `top` experts with the largest logits of `router`. Their
// weights are the softmax over all experts, divided by their sum if `normalize` is not 0. A `num_experts` of 0 means no mixture.
struct Mixture {
  int64_t num_experts;
  int64_t top;
  int64_t normalize;
  Linear router;
  const Linear* gate_up;  // [experts]
  const Linear* down;     // [experts]
};

// Decoder layer. In `gate_up`, rows of gate and up alternate in groups of one vector's lanes. The out norms are applied before
// attention's and the MLP's outputs are added to the hidden states. Missing norms are null. `rotary` is the index of the step's
// rotary embedding. An MLP without `gate_up` and experts is computed outside of the kernels.
struct Layer {
  const float* input_norm;
  const float* attention_out_norm;
  const float* mlp_norm;
  const float* mlp_out_norm;
  const float* query_norm;
  const float* key_norm;
  Linear qkv;
  Linear output;
  Linear gate_up;
  Linear down;
  Mixture mixture;
  Params params;
  int64_t rotary;
};

// Memory in which `size` ranks exchange data (see exchange.h), `piece` bytes at a time. `base` is null for a single rank.
struct Exchange {
  void* base;
  int64_t rank;
  int64_t size;
  int64_t piece;
};

// First computation of an EAGLE head; `fc.n` is 0 for other models. `fc` computes the first input from embedding and states of each
// token, side by side. With norms (EAGLE-3), it uses only the states, unless the head computed them itself. The first layer's qkv
// then reads the normed embedding and the normed states, side by side. The states bypass this attention, normed if
// `normed_residual` is not 0.
struct Fusion {
  Linear fc;
  const float* embedding_norm;
  const float* state_norm;
  int64_t normed_residual;
};

// Decoder model. A rank of several has a part of the heads, intermediate features and vocabulary. A pipeline stage has some of the
// layers, and a head only in the last stage. The first `rotary_size` elements of a head are rotated. Queries and keys are normed
// per head, or over all heads together if `norms_all_heads` is not 0. A `logit_softcap` of 0 means none. `final_norm` is null if
// there is none.
struct Model {
  int64_t num_layers;
  int64_t hidden;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t rotary_size;
  int64_t intermediate;
  int64_t activation;
  int64_t norms_all_heads;
  float eps;
  float logit_softcap;
  const Layer* layers;
  const float* final_norm;
  Linear head;
  Exchange exchange;
  Fusion fusion;
};

// Positions of a step's requests in one group of the KV cache.
struct Group {
  const int64_t* slots;        // [tokens]
  const int32_t* block_table;  // [requests, table_stride]
  int64_t table_stride;
  int64_t block_size;
};

// Rotary embedding: `cosines` and `sines` are [positions, rotary size].
struct Rotary {
  const float* cosines;
  const float* sines;
};

// Forward pass of a step, in one or more calls.
//
// `x` [tokens, hidden] holds embedded tokens first, and then the last layer's output before the final norm. If `embedding` [vocab,
// hidden] is not null, the kernels look up `token_ids` [tokens] in it; its elements are of `embedding_kind` and multiplied by
// `embedding_scale`. `positions` [tokens] are rows of the rotaries. `rows` [num_rows] are the tokens that need logits [num_rows,
// vocab]. If `keep_states` is 0, the last layer computes only the rows of `x` that the logits need.
//
// If MLPs are computed outside of the kernels, a step takes several calls. A call computes layers `first` to `last`, and of `last`
// only the attention. It writes the input of that layer's MLP to `mlp_input` [rows, hidden]. The next call starts with the
// following layer and reads the MLP's output from `mlp_output`. The rows are the tokens, or in the last layer those that need
// logits. `first` is 0 in the first call, and `last` is the number of layers in the final call. All other fields are the same in
// all calls.
//
// `sum_nanoseconds` [2 * layers] receives the times of the sums over ranks, for each layer's attention and MLP. `hidden` [tokens,
// kept, hidden] receives the inputs of `kept_layers`. `states` [tokens, width] are joined to the tokens in models with a fusion; if
// `own_states` is not 0, the head computed them itself and they are [tokens, hidden]. `segments` are tokens with adapters, in
// order. `key_ends` [tokens] are the ends of each query's keys in its request. They are after the query's own position and never
// decrease; null means causal attention. `deepstack` [num_deepstack, tokens, hidden] is added to the outputs of the first layers.
struct Step {
  int64_t num_tokens;
  int64_t num_requests;
  const int64_t* query_start;  // [requests + 1]
  const int64_t* seq_lens;     // [requests]
  const Group* groups;
  const int64_t* layer_groups;  // [layers], the group of each layer
  const Cache* caches;          // [layers]
  float* x;
  const int64_t* token_ids;
  const void* embedding;
  int64_t embedding_kind;
  float embedding_scale;
  const int64_t* positions;
  const Rotary* rotaries;
  int64_t num_rows;
  const int64_t* rows;
  float* logits;
  int64_t keep_states;
  int64_t first;
  int64_t last;
  float* mlp_input;
  const float* mlp_output;
  int64_t* sum_nanoseconds;
  int64_t num_kept;
  const int64_t* kept_layers;  // [kept]
  float* hidden;
  int64_t num_segments;
  const Segment* segments;
  const float* states;
  int64_t own_states;
  const int64_t* key_ends;
  int64_t num_deepstack;
  const float* deepstack;
};

// Chain of further steps after a step whose `rows` are the last tokens of its first requests.
//
// Request i gets `counts[i]` tokens, at most `num_drafts`, in descending order of requests. Tokens are sampled from the first
// `width` logits as in Sampling; those at place p use `uniforms[p]`. Sampled tokens that need successors are computed with rows
// `positions[p]` of the step's rotaries. The step looks up its tokens in an embedding, and its tables have blocks for them.
// `vocabulary` [width] gives each logit's token, or is null if tokens are in order. A model with a fusion joins its own output to
// the following tokens.
struct Chain {
  int64_t num_drafts;
  int64_t num_groups;
  int64_t width;
  const int64_t* counts;      // [rows]
  const int64_t* positions;   // [num_drafts - 1, rows]
  const float* temperatures;  // [rows]
  const double* uniforms;     // [num_drafts, rows]
  int64_t* tokens;            // [num_drafts, rows]
  const int64_t* vocabulary;
};

// Routing: from `logits` [tokens, stride] of a router to the experts of each token, [tokens, top], and their weights, as in
// Mixture.
struct Route {
  int64_t num_tokens;
  int64_t num_experts;
  int64_t top;
  int64_t normalize;
  const float* logits;
  int64_t stride;
  int64_t* experts;
  float* weights;
};

// Attention only. `query` is [tokens, heads, head size] and `output` [tokens, heads, value size]; strides are those of tokens.
// `key_ends` is as in Step.
struct Attention {
  int64_t num_requests;
  const int64_t* query_start;
  const int64_t* seq_lens;
  Group group;
  Cache cache;
  Params params;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t value_size;
  const float* query;
  int64_t query_stride;
  float* output;
  int64_t output_stride;
  const int64_t* key_ends;
};

// Write of new keys [tokens, kv heads, head size] and values into the cache.
struct Write {
  int64_t num_tokens;
  const int64_t* slots;
  Cache cache;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t value_size;
  const float* keys;
  int64_t key_stride;
  const float* values;
  int64_t value_stride;
};

// Sampling from `logits` [rows, width]. `columns` receives the likeliest token of each row. If the row's temperature is not 0 and
// its peak is finite, the token is sampled with the row's uniform number in [0, 1) instead.
struct Sampling {
  int64_t rows;
  int64_t width;
  const float* logits;
  const float* temperatures;
  const double* uniforms;
  float* peaks;
  int64_t* columns;
};

// Rows of `logits` [.., width] in which only tokens with a set bit are kept. Bit t % 32 of word t / 32 is token t. `bits` is
// [count, words], contiguous.
struct Mask {
  int64_t count;
  int64_t width;
  float* logits;
  const int64_t* rows;
  const uint32_t* bits;
  int64_t words;
};

}  // namespace penstock
