// What Python hands over. Every struct here has its twin in penstock_enginecore/native/ffi_structs.py.
#pragma once

#include <cstdint>

namespace penstock {

constexpr int kChunk = 16;  // tokens of the KV cache that lie together: see attention.h

// What the numbers of a packed weight are.
enum Kind : int64_t { kFloat32, kBfloat16, kInt8 };

// y = x W^T + bias. `packed`: W in panels, see gemm.h, of `kind`. `scales` [n, whole panels]: what the integers of an output feature
// are multiplied with; null for floats. `n` output features, `k` inputs, each in `parts` bfloat16 numbers where a matrix unit
// multiplies, see parts.h; 0: as it is.
struct Linear {
  const void* packed;
  const float* scales;
  const float* bias;
  int64_t n;
  int64_t k;
  int64_t kind;
  int64_t parts;
};

// Output features of a projection among those of a weight: `vectors` of them, of kLanes each, the last of which may be part of one.
// `b` [vectors][rank][kLanes], of bfloat16 [vectors][rank / 2, rounded up][kLanes][2]; they take `rank` of a row's sums, from `first` on.
struct Piece {
  const void* b;
  int64_t vectors;
  int64_t first;
  int64_t rank;
};

// What an adapter adds to a product with a weight of `k` inputs. `a`: rows of all its projections, `a_stride` numbers each, with zeros
// at the end up to whole pairs of vectors, in groups of four, the last of which may have fewer: [rank / 4][a_stride / 2 kLanes][4][2 kLanes],
// of bfloat16 [..][4][kLanes][2], of which the second numbers are the inputs a vector behind the first. `interleaved` is not 0: vectors of
// the two pieces, of one size, take turns; else the pieces come one after the other. `rank` is 0: nothing.
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

// Rows `first` to before `end` have an adapter: `updates` of qkv, output, gate_up and down of each layer, then of the head. The largest
// rank of them is `width`.
struct Segment {
  const Update* updates;
  int64_t first;
  int64_t end;
  int64_t width;
};

// Products of some rows by one weight, of others by another: rows `ends[g - 1]` to `ends[g]` by `linears[g]`, all of one `n`, `k`,
// `kind` and `parts`. `from` [rows]: where in `x` a row's inputs lie; null where they lie in order. `silu` is not 0: rows of gate and
// up alternate in the weights, a vector's lanes of each, which have no bias, and `out` is silu(gate) * up.
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

// A layer's keys and values: `num_slots` rows, `key_stride` and `value_stride` numbers apart. They are floats, or, where `pairs` is not
// 0, bfloat16.
struct Cache {
  void* keys;
  void* values;
  int64_t key_stride;
  int64_t value_stride;
  int64_t pairs;
};

// How to attend. 0 for `window` and `chunk` is none, for `softcap` off; `sinks` [heads] or null.
struct Params {
  int64_t window;
  int64_t chunk;
  float scaling;
  float softcap;
  const float* sinks;
};

// What a gate passes through before it is multiplied with up. kGelu: the tanh approximation.
enum Activation : int64_t { kSiluGate, kGeluGate };

// Experts, rows of whose gates and ups alternate, too. A token gets the `top` of them whose numbers of `router` are the largest,
// weighted by the softmax of all, and, where `normalize` is not 0, divided by the sum of its weights. `num_experts` is 0: none.
struct Mixture {
  int64_t num_experts;
  int64_t top;
  int64_t normalize;
  Linear router;
  const Linear* gate_up;  // [experts]
  const Linear* down;     // [experts]
};

// `gate_up`: rows of gate and up alternate, a vector's lanes of each. The norms of what attention and MLP put out come before it is
// added to the hidden states. Norms that a layer has none of are null. `rotary`: which of a step's. An MLP that
// has neither `gate_up` nor experts is computed elsewhere.
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

// Memory in which `size` ranks exchange, see exchange.h, a piece of so many bytes at a time. `base` is null for a rank alone.
struct Exchange {
  void* base;
  int64_t rank;
  int64_t size;
  int64_t piece;
};

// What the first layer of an EAGLE head gets in place of embedded tokens; `fc.n` is 0: nothing of the kind. By `fc` from embedding and
// states of each token, side by side. Or, where there are norms (EAGLE-3), from the states alone, unless the head put them out itself;
// that layer's qkv reads the embedding and what came of the states, each normed, side by side, and the latter goes around its attention,
// normed where `normed_residual` is not 0.
struct Fusion {
  Linear fc;
  const float* embedding_norm;
  const float* state_norm;
  int64_t normed_residual;
};

// A rank among others has some of the heads, of the intermediate features and of the vocabulary; a stage of a pipeline some of the
// layers, and no head unless it is the last. Of a head the first `rotary_size` numbers are rotated. Queries, and
// keys, are normed head by head, or, where `norms_all_heads` is not 0, all heads as one. `logit_softcap` is 0: off. `final_norm` is null
// where there is none.
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

// Where the requests of a step lie, in one group of the KV cache.
struct Group {
  const int64_t* slots;        // [tokens]
  const int32_t* block_table;  // [requests, table_stride]
  int64_t table_stride;
  int64_t block_size;
};

// `cosines` and `sines` [positions, rotary size].
struct Rotary {
  const float* cosines;
  const float* sines;
};

// `x` [tokens, hidden]: embedded tokens in, the last layer's output out, before the final norm. Where `embedding` [vocab, hidden] is not
// null, rows of it, numbers of `embedding_kind`, times `embedding_scale` are what `token_ids` [tokens] become. `positions` [tokens]: rows
// of the rotaries.
// `rows` [num_rows]: tokens whose logits [num_rows, vocab] are wanted.
// `keep_states` is 0: of `x` the last layer puts out no more than the logits need, and leaves the rest as it was.
// Where MLPs are computed elsewhere, a step takes several calls. One computes layers `first` to `last`, and of the last its attention
// alone, whose MLP's input it puts into `mlp_input` [rows, hidden]; the next begins with the layer behind, and has in `mlp_output` what
// became of that input. The rows are the tokens, of the last layer those that the logits need. `first` is 0 in the first call, `last`
// the number of layers in the one that ends the step. All else is the same in all of them.
// `sum_nanoseconds` [2 * layers]: how long the sums over the ranks take is put there, those of a layer's attention and of its MLP.
// `hidden` [tokens, kept, hidden]: what comes into each of the `kept_layers` is put there.
// `states` [tokens, width]: what a model with a fusion joins to the tokens; `own_states` is not 0: it put them out itself, [tokens, hidden].
// `segments`: tokens with adapters, in order.
// `key_ends` [tokens]: a query sees the keys of its request up to this position, which is behind its own and no smaller than that of the
// token before; null: none behind itself.
// `deepstack` [num_deepstack, tokens, hidden] is added to what comes out of the first layers.
struct Step {
  int64_t num_tokens;
  int64_t num_requests;
  const int64_t* query_start;  // [requests + 1]
  const int64_t* seq_lens;     // [requests]
  const Group* groups;
  const int64_t* layer_groups;  // [layers]: which group a layer is in
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

// How a decoder goes on behind a step, whose `rows` are the last tokens of its first requests, one of each. Of request i it chooses
// `counts[i]` tokens, `num_drafts` at most, and of none more than of the one before; from the first `width` logits, as Sampling says.
// The tokens of place p are chosen with `uniforms[p]`. Those that others come behind are computed with rows `positions[p]` of the
// step's rotaries; the step looks its own tokens up in an embedding, and has blocks for them in its tables. `vocabulary` [width]: the
// token that each logit is of, null where they are in order. A model with a fusion joins what it put out to the tokens that come behind.
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

// `logits` [tokens, stride] of a router to the experts of each token, [tokens, top], and their weights: see Mixture.
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

// Attention alone. `query` [tokens, heads, head size], `output` [tokens, heads, value size]; the strides are those of tokens.
// `key_ends`: as in Step.
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

// New keys [tokens, kv heads, head size] and values for the cache.
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

// `logits` [rows, width]. In `columns` the likeliest token of each row or, where its temperature is not 0 and its peak is
// finite, one drawn with its uniform number in [0, 1).
struct Sampling {
  int64_t rows;
  int64_t width;
  const float* logits;
  const float* temperatures;
  const double* uniforms;
  float* peaks;
  int64_t* columns;
};

// Rows of `logits` [.., width] of which only the tokens stay whose bits are set: bit t % 32 of word t / 32 is token t. `bits`
// [count, words], one behind the other.
struct Mask {
  int64_t count;
  int64_t width;
  float* logits;
  const int64_t* rows;
  const uint32_t* bits;
  int64_t words;
};

}  // namespace penstock
