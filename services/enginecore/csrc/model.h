// Structs that Python code passes to the kernels. penstock_enginecore/native/ffi_structs.py defines the same structs.
#pragma once

#include <cstdint>

namespace penstock {

constexpr int kChunk = 16;  // number of tokens of the KV cache that are stored together, see attention.h

// Dtypes of the elements of packed weights.
enum Kind : int64_t { kFloat32, kBfloat16, kInt8 };
constexpr int64_t kPackedRows = 3;  // format of an embedding table that is a packed weight (Linear)

// Linear layer y = x W^T + bias with `n` output features and `k` inputs. `packed` is W in panels (see gemm.h), with elements of
// `kind`. `scales` [n, padded to panels] has the factor of the integers of each output feature, or is null for floats. `parts` is
// the number of bfloat16 values into which each input is split for a matrix unit (see parts.h), or 0 if inputs are not split.
struct Linear {
  const void* packed;
  const float* scales;
  const float* bias;
  int64_t n;
  int64_t k;
  int64_t kind;
  int64_t parts;
};

// Part of a LoRA update for the output features of one projection: `vectors` vectors of kLanes features. The last vector may be
// partial. `b` is [vectors][rank][kLanes], or for bfloat16 [vectors][rank / 2, rounded up][kLanes][2]. It is multiplied by `rank`
// small sums of a row (see lora.h), starting at index `first`.
struct Piece {
  const void* b;
  int64_t vectors;
  int64_t first;
  int64_t rank;
};

// LoRA update of the matrix product with a weight of `k` inputs. A `rank` of 0 means no update.
// `a` has the rows of the matrices A of all projections. Each row has `a_stride` elements, padded with zeros to a multiple of two
// vectors. Rows are stored in groups of four, and the last group may have fewer rows. The layout is [rank / 4][a_stride / 2
// kLanes][4][2 kLanes]. For bfloat16, the layout is [..][4][kLanes][2], where the second element of each pair belongs to the input
// kLanes later. If `interleaved` is not 0, the two pieces have equal sizes, and their vectors alternate. Otherwise the output
// features of the pieces follow each other.
struct Update {
  const void* a;
  int64_t a_stride;
  int64_t a_kind;
  int64_t b_kind;
  int64_t k;
  int64_t rank;
  int64_t interleaved;
  int64_t num_pieces;
  Piece pieces[4];
};

// Range of rows, `first` to `end - 1`, which use the same LoRA adapter. `updates` has the adapter's updates of the products qkv,
// output, gate_up and down and of the two products of `embedding` of each layer, then the updates of the head and of the projection
// in LayerInputs. `width` is the largest rank of these updates.
struct Segment {
  const Update* updates;
  int64_t first;
  int64_t end;
  int64_t width;
};

// Gate of an MLP: `activation` is kSiluGate, kGeluGate or kClampedGate. `alpha` and `limit` are the parameters of kClampedGate, whose
// result is (up + 1) gate logistic(alpha gate), with gates of at most `limit`, and values of up from -limit to limit. With another
// activation, there is no gate, and the activation is applied to up.
struct Gate {
  int64_t activation;
  float alpha;
  float limit;
};

// Grouped matrix product: each group of rows is multiplied by a different weight. The rows from `ends[g - 1]` to `ends[g] - 1` are
// multiplied by `linears[g]`. All weights have the same `n`, `k`, `kind` and `parts`. `from` [rows] has, for each row, the index of
// the row of `x` that contains its inputs. `from` is null if the rows of `x` are in the order of the groups. If `gated` is not 0,
// groups of kLanes rows of gate and of up alternate in the weights and biases, and `out` is the result of `gate`.
struct Grouped {
  int64_t num_groups;
  const Linear* linears;
  const int64_t* ends;
  const int64_t* from;
  const float* x;
  int64_t stride;
  float* out;
  int64_t out_stride;
  int64_t gated;
  Gate gate;
};

// KV cache of a layer: keys and values of `num_slots` slots, with strides of `key_stride` and `value_stride` elements. The elements
// are floats, or bfloat16 if `pairs` is not 0.
struct Cache {
  void* keys;
  void* values;
  int64_t key_stride;
  int64_t value_stride;
  int64_t pairs;
};

// Attention parameters of a layer. If `window`, `chunk` or `softcap` is 0, the layer has no sliding window, no attention chunks or
// no soft cap. `sinks` is [heads], or null without attention sinks.
struct Params {
  int64_t window;
  int64_t chunk;
  float scaling;
  float softcap;
  const float* sinks;
};

// Memory of a recurrent layer (see states.h): closed states in slots, and open rows in a ring buffer of `length` positions for each
// request. The layouts are `tails` [slots, kernel - 1, channels], `inputs` [rings, length, channels], `closed` [slots, heads, key
// size, value size], `keys` [rings, length, key heads, key size], `updates` [rings, length, heads, value size], `decays` [rings,
// length, heads, decay size], where the decay size is 1, or the key size if each row of a state has a decay. A short convolution
// has no heads. Only its `tails` and `inputs` are not null.
struct StateMemory {
  float* tails;
  float* inputs;
  float* closed;
  float* keys;
  float* updates;
  float* decays;
  int64_t length;
  int64_t channels;
  int64_t kernel;
  int64_t num_heads;
  int64_t num_key_heads;
  int64_t key_size;
  int64_t value_size;
  int64_t decay_size;
};

// Tokens of a request in a step: `count` rows of the flat batch from row `first` on, at positions from `start` on. `closed` is the
// slot of the last closed state before `start`. The step stores the states that the writes `first_write` to `end_write - 1`
// describe.
struct StateSequence {
  int64_t first;
  int64_t start;
  int64_t count;
  int64_t ring;
  int64_t closed;
  int64_t first_write;
  int64_t end_write;
};

// State that a step must store in `slot`: the state after all tokens before position `end`, which is the end of a span.
struct StateWrite {
  int64_t end;
  int64_t slot;
};

// Recurrent states of all sequences of a step. `broken` [sequences] becomes 1 for sequences with a NaN or infinity in a state that
// the step stores.
struct StateStep {
  int64_t num_sequences;
  const StateSequence* sequences;
  const StateWrite* writes;
  int64_t* broken;
};

// Causal convolution of a recurrent layer, separately for each channel. `weight` is [kernel, channels], and its last row belongs to
// the newest input. `bias` is null if the layer has no bias. If `silu` is not 0, SiLU is applied to the outputs.
struct Convolution {
  StateMemory memory;
  const float* weight;
  const float* bias;
  int64_t silu;
  const float* x;
  int64_t stride;
  float* out;
  int64_t out_stride;
};

// Linear recurrence of a recurrent layer (see states.h). Rows of `query` and `key` are [key heads, key size], rows of `value` and
// `out` are [heads, value size], rows of `decay` are [heads, decay size], and rows of `beta` are [heads]. `beta` is null for a
// recurrence without correction. `rates` [heads, key size] is null except for selective scans (see selective.h).
struct Scan {
  StateMemory memory;
  const float* query;
  int64_t query_stride;
  const float* key;
  int64_t key_stride;
  const float* value;
  int64_t value_stride;
  const float* decay;
  int64_t decay_stride;
  const float* beta;
  int64_t beta_stride;
  const float* rates;
  float* out;
  int64_t out_stride;
};

// Activations of an MLP. kSiluGate and kGeluGate are applied to the gate before the multiplication by up. The others are applied to
// the outputs of `gate_up`, which then has no gate. kGeluGate and kGelu are the tanh approximation of gelu. kExactGelu has an
// absolute error of at most 1e-7 times the input. Only experts may have kClampedGate (see Gate).
enum Activation : int64_t { kSiluGate, kGeluGate, kSquaredRelu, kRelu, kGelu, kExactGelu, kClampedGate };

// Norms of a layer with a mixture of experts beside its MLP. MLP, router and experts read the same hidden states. `router` and
// `experts` are the norms of the inputs of router and experts. `mlp_out` and `experts_out` are applied to the outputs of MLP and
// experts before these outputs are added to each other.
struct BesideNorms {
  const float* router;
  const float* experts;
  const float* mlp_out;
  const float* experts_out;
};

inline bool has_gate(const Gate& gate) {
  return gate.activation == kSiluGate || gate.activation == kGeluGate || gate.activation == kClampedGate;
}

// Functions that compute the scores of experts from the logits of a router.
enum Scoring : int64_t { kSoftmax, kLogistic };

// Expert that computes every token, in addition to the experts that the router chooses. With kGatedShared, its output is multiplied
// by the logistic function of the last logit of the router.
enum Shared : int64_t { kNoShared, kShared, kGatedShared };

// Choice of a token's experts, and of their weights. A router has one logit for each expert. The token uses the `top` experts with
// the largest scores. If `correction` [experts] is not null, it is added to the scores for this choice, but not for the weights. If
// `groups` is greater than 1, only experts in the `kept` best groups of consecutive experts are chosen. The score of a group is its
// largest score, or with a correction the sum of its two largest scores. The weights of the chosen experts are their scores. These
// weights are divided by their sum if `normalize` is not 0, multiplied by `factor`, and multiplied by `scales` [experts] if `scales`
// is not null. The expert `shared` follows the chosen experts. Its index is `num_experts`, and its weight 1 if it has no gate.
struct Routing {
  int64_t num_experts;
  int64_t top;
  int64_t scoring;
  int64_t normalize;
  int64_t groups;
  int64_t kept;
  int64_t shared;
  float factor;
  const float* correction;
  const float* scales;
};

// Mixture of experts of a layer. In `gate_up` of the experts, groups of kLanes rows of gate and of up alternate, or there is no gate.
// The weights of a
// token's experts multiply the outputs of the experts. If `scales_inputs` is not 0, the weights of the experts that the router
// chooses multiply the inputs instead. If `routing.num_experts` is 0, the layer has no mixture. `norms` are null if the layer has no
// MLP.
struct Mixture {
  Routing routing;
  Gate gate;
  int64_t scales_inputs;
  BesideNorms norms;
  Linear router;
  const Linear* gate_up;  // [experts], and then the shared expert
  const Linear* down;     // the same
};

// Kinds of recurrent layers: the gated delta rule, Mamba-2's state space duality, and a short convolution between two gates.
enum RecurrenceKind : int64_t { kNoRecurrence, kDeltaRule, kDuality, kShortConvolution };

// Recurrent part of a decoder layer, between the layer's products `qkv` and `output`. Output rows of `qkv` have the `channels`
// inputs of the convolution at index `channels_at`. At other indices they have the gate, the steps and beta. The delta rule and the
// duality each use some of these values. A short convolution multiplies its inputs by the `channels` values at `step_at` and its
// outputs by the gate. `weight` is [kernel, channels]. `decay` [heads] is a negative factor: a token's decay is this factor times
// its step. `step_bias` [heads] is added to the steps. `skip` [heads] is the factor with which the values are added to the outputs.
// `norm` [heads, value size] is the weight of a norm over groups of `norm_size` elements. The norm is applied before the gate, or
// after the gate if `gates_first` is not 0. Parameters that the model does not have are null.
struct Recurrence {
  int64_t kind;
  const float* weight;
  const float* bias;
  int64_t silu;
  int64_t channels;
  int64_t kernel;
  int64_t num_heads;
  int64_t num_key_heads;
  int64_t key_size;
  int64_t value_size;
  int64_t channels_at;
  int64_t gate_at;
  int64_t step_at;
  int64_t beta_at;
  const float* decay;
  const float* step_bias;
  const float* skip;
  const float* norm;
  int64_t norm_size;
  int64_t gates_first;
  float eps;
  float min_step;
  float max_step;
};

// Elements that a rotary embedding rotates together: element i of each half, or neighbours. Neighbours are stored as they were, or
// in halves: first the first element of each pair.
enum RotaryOrder : int64_t { kHalvesOrder, kPairsToHalvesOrder, kPairsOrder };

// Latent attention (MLA) of a decoder layer, between the layer's products `qkv` and `output` (see latent.h). Output rows of `qkv`
// have the queries or their low-rank input, then the latent, then the rotated part of the key. `query_norm` and `key_norm` of the
// layer are the norms of the low-rank input and of the latent. `up` computes the queries of all heads from the low-rank input, or
// `up.n` is 0. A query has `plain_size` elements, then `rotary_size` elements. `absorb` [heads] are the products with a head's
// query, of size [latent, plain size], and `expand` [heads] the products with a head's output, of size [value size, latent]. If
// `num_heads` is 0, the layer has no latent attention.
struct Latent {
  int64_t num_heads;
  int64_t latent;
  int64_t rotary_size;
  int64_t plain_size;
  int64_t value_size;
  int64_t order;
  Linear up;
  const Linear* absorb;
  const Linear* expand;
  float query_eps;
  float key_eps;
};

// Embedding of token ids that a layer adds to its output, as in Gemma 4 E2B (see layer_embeddings.h). `gate` computes `size` numbers
// from the hidden states after the MLP's addition. The activation of the model's gates is applied to these numbers, which are then
// multiplied by the token's inputs for this layer (see LayerInputs). `projection` computes the addition, which has the norm `norm`.
// If `gate.n` is 0, the layer has no such embedding.
struct LayerEmbedding {
  Linear gate;
  Linear projection;
  const float* norm;
};

// Inputs of the embeddings of all layers, [layers, size] for each token. They are the sum of the token's row in a table (see
// LayerRows) and of the output of `projection` for the first layer's input. The norm `norm` [size], with the epsilon `eps`, is
// applied to the part of this output for each layer. If `size` is 0, the layers have no embeddings of token ids.
struct LayerInputs {
  int64_t size;
  Linear projection;
  const float* norm;
  float eps;
};

// Decoder layer. In `gate_up`, groups of kLanes rows of gate and of up alternate. `attention_out_norm` and `mlp_out_norm` are
// applied to the outputs of attention and MLP before these outputs are added to the hidden states. Norms that the model does not
// have are null. `rotary` is the index of the layer's rotary embedding among the `rotaries` of the step. If a layer has neither
// `gate_up` nor experts, its MLP is computed outside the kernels. If the layer has both, the outputs of MLP and experts are added
// to each other (see BesideNorms). If `gated` is not 0, output rows of `qkv` end with a gate, and the heads' outputs are multiplied
// by the logistic function of this gate. If `norms_values` is not 0, values are normed without a weight. If `keys_as_values` is not
// 0, `qkv` has no rows for values, and the values are the keys before their norm and rotation. If `shares` is not 0, `qkv` has only
// rows for queries, and the layer attends to the KV cache of an earlier layer, without writing to it. A recurrent layer and a layer
// with latent attention have no such heads, and their numbers and sizes of heads are 0. If `alone` is not 0, the layer has no MLP. If
// `parallel` is not 0, the input of `mlp_norm` is the layer's input, and not the sum of this input and the output of attention. The
// outputs of attention and MLP are multiplied by `attention_factor` and `mlp_factor` before these outputs are added to the hidden
// states. An output with a norm has the factor 1. After the layer's last addition, which is that of the MLP's output or of
// `embedding`, the hidden states are multiplied by `scale`.
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
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t rotary;
  int64_t gated;
  int64_t norms_values;
  int64_t keys_as_values;
  int64_t shares;
  int64_t alone;
  int64_t parallel;
  float attention_factor;
  float mlp_factor;
  float scale;
  Recurrence recurrence;
  Latent latent;
  LayerEmbedding embedding;
};

// Shared memory through which `size` ranks exchange data in pieces of `piece` bytes (see exchange.h). `base` is null for a single
// rank.
struct Exchange {
  void* base;
  int64_t rank;
  int64_t size;
  int64_t piece;
};

// First computation of an EAGLE head, a small model that proposes drafts from the hidden states of the main model. `fc.n` is 0 for
// other models. `fc` computes the first layer's input from the concatenation of each token's embedding and hidden states. In a head
// with norms (EAGLE-3), the input of `fc` is only the hidden states, and `fc` is not applied to hidden states that the head itself
// has computed. The first layer's qkv then reads the concatenation of the normed embedding and the normed hidden states. The output
// of this layer's attention is added to the hidden states, or to the normed hidden states if `normed_residual` is not 0.
struct Fusion {
  Linear fc;
  const float* embedding_norm;
  const float* state_norm;
  int64_t normed_residual;
};

// Decoder model, or the part of it that one process computes. With several tensor-parallel ranks, each rank has a part of the
// heads, intermediate features and vocabulary. A pipeline stage has some of the layers, and only the last stage has a head. The
// norms of queries and keys are applied to each head, or to all heads together if `norms_all_heads` is not 0. These norms are applied
// after the rotation if `norms_rotated` is not 0. If `pairs` is not 0, elements 2i and 2i + 1 are rotated together, and not an
// element of the first half with an element of the second half. If `logit_softcap` is 0, logits are not capped. `final_norm` is null
// if the model has no final norm. If `centers` is not 0, all norms subtract the mean, and the memory of a norm of `n` elements has
// first its weights [n] and then its biases [n]. Norms of values never subtract the mean.
struct Model {
  int64_t num_layers;
  int64_t hidden;
  int64_t intermediate;
  int64_t activation;
  int64_t norms_all_heads;
  int64_t norms_rotated;
  int64_t pairs;
  int64_t centers;
  float eps;
  float logit_softcap;
  const Layer* layers;
  const float* final_norm;
  Linear head;
  Exchange exchange;
  Fusion fusion;
  LayerInputs layer_inputs;
};

// Slots of a step's tokens, and block tables of its requests, in one KV cache group.
struct Group {
  const int64_t* slots;        // [tokens]
  const int32_t* block_table;  // [requests, table_stride]
  int64_t table_stride;
  int64_t block_size;
};

// Rotary embedding of the first `size` elements of each head: `cosines` and `sines` are [positions, size]. Queries are multiplied by
// `query_scales` [positions], which is null if the layers with this rotary embedding do not scale queries by position.
struct Rotary {
  const float* cosines;
  const float* sines;
  const float* query_scales;
  int64_t size;
};

// Rows of the table [vocab, layers * size] with embeddings of token ids for all layers (see LayerInputs). The rows `ids` [tokens] of
// the table belong to the step's tokens. The table's elements have the dtype `kind`. They are multiplied by `scale`.
struct LayerRows {
  const void* table;
  int64_t kind;
  float scale;
  const int64_t* ids;
};

// Forward pass of a step, in one or more calls.
// Before the first call, `x` [tokens, hidden] contains the embedded tokens. After the last call, `x` contains the last layer's
// output before the final norm. If `embedding` [vocab, hidden] is not null, the kernels look up `token_ids` [tokens] in this table.
// The table's elements have the dtype `embedding_kind`, or the table is a Linear (kPackedRows). They are multiplied by `embedding_scale`. `positions` [tokens] are indices of
// rows of the rotary embeddings. `rows` [num_rows] are the indices of the tokens whose logits [num_rows, vocab] are needed. If
// `keep_states` is 0, the last layer computes only these rows of `x`, and so do the layers at the end with `shares`.
// If MLPs are computed outside the kernels, a step needs several calls. A call computes the layers `first` to `last - 1` and the
// attention of layer `last`, and writes the input of the MLP of layer `last` to `mlp_input` [rows, hidden]. The next call starts
// with the layer after `last` and reads the MLP's output from `mlp_output`. The rows are all tokens, or in the last layer the
// tokens whose logits are needed. `first` is 0 in the first call, and `last` is the number of layers in the final call. All other
// fields are the same in all calls.
// `sum_nanoseconds` [2 * layers] receives the duration of the sums over ranks after each layer's attention and after its MLP.
// `hidden` [tokens, kept, hidden] receives the inputs of `kept_layers`. `states` [tokens, width] are the hidden states that an
// EAGLE head (see Fusion) gets as second input. If `own_states` is not 0, the head itself has computed these hidden states, and
// they are [tokens, hidden]. `segments` are the ranges of tokens with LoRA adapters, in order. `key_ends` [tokens] has, for each
// token, the end of the positions to which its query attends. An end is after the token's own position, and within a request ends
// never decrease. If `key_ends` is null, attention is causal. If `windowed_ends` is not 0, attention is also causal in layers
// without a sliding window. `deepstack` [num_deepstack, tokens, hidden] is added to the outputs of the first layers. `recurrent` and `memories` [layers] describe the states of recurrent layers and their memory, or are null.
// Only the pointers and `length` of a memory are used.
struct Step {
  int64_t num_tokens;
  int64_t num_requests;
  const int64_t* query_start;  // [requests + 1]
  const int64_t* seq_lens;     // [requests]
  const Group* groups;
  const int64_t* layer_groups;  // [layers], the KV cache group of each layer
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
  int64_t windowed_ends;
  int64_t num_deepstack;
  const float* deepstack;
  const StateStep* recurrent;
  const StateMemory* memories;
  LayerRows layer_rows;
};

// Sampling of several tokens after a step, in a chain of further steps. The `rows` of the first step are the last tokens of the
// step's first requests.
// Request i gets `counts[i]` tokens, at most `num_drafts`. Requests are sorted by `counts`, largest first. Tokens are sampled from
// the first `width` logits as in Sampling. The tokens at index p of the chain use `uniforms[p]`. If a request needs more tokens
// after the token at index p, a further step computes this token with the rows `positions[p]` of the step's rotary embeddings. The
// step must look up its tokens in an embedding, and its block tables must have blocks for the new tokens. A table in `layer_rows`
// must have a row for each token. `vocabulary` [width] has
// the token ID of each column of the logits, or is null if the index of each column is its token ID. In an EAGLE head (see Fusion),
// the hidden states for a sampled token are the head's output for the token before it.
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

// Choice of the experts of each token, and of the weights of these experts, from the router's `logits` [tokens, stride]. `experts`
// and `weights` are [tokens, top], or [tokens, top + 1] with a shared expert.
struct Route {
  int64_t num_tokens;
  Routing routing;
  const float* logits;
  int64_t stride;
  int64_t* experts;
  float* weights;
};

// Attention of a step without the rest of a layer. `query` is [tokens, heads, head size] and `output` is [tokens, heads, value
// size]. Strides are distances between tokens. `key_ends` is as in Step, but an end may also be at or before the token's own position.
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

// New keys [tokens, kv heads, head size] and values that are written into a layer's KV cache.
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

// Sampling from `logits` [rows, width]. `columns` receives the first column with the largest logit of each row. If a row's
// temperature is not 0 and its largest logit is finite, the column is instead sampled with the row's random number in [0, 1).
struct Sampling {
  int64_t rows;
  int64_t width;
  const float* logits;
  const float* temperatures;
  const double* uniforms;
  float* peaks;
  int64_t* columns;
};

// Rows of `logits` [.., width] in which only tokens with a set bit in `bits` are allowed. The logits of other tokens become
// -infinity. Bit t % 32 of word t / 32 belongs to token t. `bits` is [count, words], contiguous.
struct Mask {
  int64_t count;
  int64_t width;
  float* logits;
  const int64_t* rows;
  const uint32_t* bits;
  int64_t words;
};

}  // namespace penstock
