"""Structs that are passed to the CPU kernels, with the same fields in the same order as in ``csrc/model.h``."""

import ctypes
from typing import Any

_Int = ctypes.c_int64
_Pointer = ctypes.c_void_p


class Linear(ctypes.Structure):
    """Packed weight ``[n, k]`` of a linear layer, the scales of an integer weight, and the bias. ``kind`` is the number
    of the dtype. ``parts`` is the number of bfloat16 values into which a matrix unit splits each input.
    """

    _fields_ = [
        ("packed", _Pointer),
        ("scales", _Pointer),
        ("bias", _Pointer),
        ("n", _Int),
        ("k", _Int),
        ("kind", _Int),
        ("parts", _Int),
    ]


class Piece(ctypes.Structure):
    """Part of a LoRA update for ``vectors`` SIMD vectors of output features. The part uses ``rank`` elements of the
    product of a row and A, from element ``first`` on.
    """

    _fields_ = [("b", _Pointer), ("vectors", _Int), ("first", _Int), ("rank", _Int)]


class Update(ctypes.Structure):
    """LoRA update of the matrix product with a weight of ``k`` inputs. A ``rank`` of 0 means no update. The fields
    ``a_kind`` and ``b_kind`` are numbers of dtypes from ``KINDS``.
    """

    _fields_ = [
        ("a", _Pointer),
        ("a_stride", _Int),
        ("a_kind", _Int),
        ("b_kind", _Int),
        ("k", _Int),
        ("rank", _Int),
        ("interleaved", _Int),
        ("num_pieces", _Int),
        ("pieces", Piece * 4),
    ]


class Segment(ctypes.Structure):
    """Range of rows that use one LoRA adapter, the adapter's updates, and the largest rank of these updates."""

    _fields_ = [("updates", _Pointer), ("first", _Int), ("end", _Int), ("width", _Int)]


class Gate(ctypes.Structure):
    """Gate of an MLP: the number of its activation, and the parameters of a clamped gate."""

    _fields_ = [("activation", _Int), ("alpha", ctypes.c_float), ("limit", ctypes.c_float)]


class Grouped(ctypes.Structure):
    """Grouped matrix product: each group of rows is multiplied by a separate weight."""

    _fields_ = [
        ("num_groups", _Int),
        ("linears", ctypes.POINTER(Linear)),
        ("ends", _Pointer),
        ("from_rows", _Pointer),
        ("x", _Pointer),
        ("stride", _Int),
        ("out", _Pointer),
        ("out_stride", _Int),
        ("gated", _Int),
        ("gate", Gate),
    ]


class Cache(ctypes.Structure):
    """KV cache of a layer. Strides are in elements per slot. ``pairs`` is true if keys and values are bfloat16."""

    _fields_ = [
        ("keys", _Pointer),
        ("values", _Pointer),
        ("key_stride", _Int),
        ("value_stride", _Int),
        ("pairs", _Int),
    ]


class Params(ctypes.Structure):
    """Attention parameters of a layer, as in ``AttentionParams``. Parameters that the layer does not use are 0 or null."""

    _fields_ = [
        ("window", _Int),
        ("chunk", _Int),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sinks", _Pointer),
    ]


class BesideNorms(ctypes.Structure):
    """Norms of the inputs of router and experts and of the outputs of MLP and experts, in a layer with both an MLP and a
    mixture of experts.
    """

    _fields_ = [("router", _Pointer), ("experts", _Pointer), ("mlp_out", _Pointer), ("experts_out", _Pointer)]


class Routing(ctypes.Structure):
    """Choice of a token's experts by the logits of a router, and of the experts' weights. Pointers may be null."""

    _fields_ = [
        ("num_experts", _Int),
        ("top", _Int),
        ("scoring", _Int),
        ("normalize", _Int),
        ("groups", _Int),
        ("kept", _Int),
        ("shared", _Int),
        ("factor", ctypes.c_float),
        ("correction", _Pointer),
        ("scales", _Pointer),
    ]


class Mixture(ctypes.Structure):
    """Mixture of experts of a layer: the experts and their router. All fields are 0 if the layer has no experts.
    ``norms`` are null if the layer has no MLP.
    """

    _fields_ = [
        ("routing", Routing),
        ("gate", Gate),
        ("scales_inputs", _Int),
        ("norms", BesideNorms),
        ("router", Linear),
        ("gate_up", ctypes.POINTER(Linear)),
        ("down", ctypes.POINTER(Linear)),
    ]


class StateMemory(ctypes.Structure):
    """Memory for the states of a recurrent layer, and the layer's sizes, as in ``states.memory.StateLayer``. Tensors
    that the layer does not have are null.
    """

    _fields_ = [
        ("tails", _Pointer),
        ("inputs", _Pointer),
        ("closed", _Pointer),
        ("keys", _Pointer),
        ("updates", _Pointer),
        ("decays", _Pointer),
        ("length", _Int),
        ("channels", _Int),
        ("kernel", _Int),
        ("num_heads", _Int),
        ("num_key_heads", _Int),
        ("key_size", _Int),
        ("value_size", _Int),
        ("decay_size", _Int),
    ]


class StateSequence(ctypes.Structure):
    """Tokens of one request in a step, and the request's recurrent states."""

    _fields_ = [
        ("first", _Int),
        ("start", _Int),
        ("count", _Int),
        ("ring", _Int),
        ("closed", _Int),
        ("first_write", _Int),
        ("end_write", _Int),
    ]


class StateWrite(ctypes.Structure):
    """State that a step must write: the position at which the span ends, and the slot for the state at that position."""

    _fields_ = [("end", _Int), ("slot", _Int)]


class StateStep(ctypes.Structure):
    """Recurrent states of all requests of a step."""

    _fields_ = [("num_sequences", _Int), ("sequences", _Pointer), ("writes", _Pointer), ("broken", _Pointer)]


class Recurrence(ctypes.Structure):
    """Recurrent part of a decoder layer. All fields are 0 if the layer has attention. Parameters that the model does
    not have are null.
    """

    _fields_ = [
        ("kind", _Int),
        ("weight", _Pointer),
        ("bias", _Pointer),
        ("silu", _Int),
        ("channels", _Int),
        ("kernel", _Int),
        ("num_heads", _Int),
        ("num_key_heads", _Int),
        ("key_size", _Int),
        ("value_size", _Int),
        ("channels_at", _Int),
        ("gate_at", _Int),
        ("step_at", _Int),
        ("beta_at", _Int),
        ("decay", _Pointer),
        ("step_bias", _Pointer),
        ("skip", _Pointer),
        ("norm", _Pointer),
        ("norm_size", _Int),
        ("gates_first", _Int),
        ("eps", ctypes.c_float),
        ("min_step", ctypes.c_float),
        ("max_step", ctypes.c_float),
    ]


class Latent(ctypes.Structure):
    """Latent attention (MLA) of a decoder layer. All fields are 0 if the layer has none. ``absorb`` and ``expand`` are
    arrays with a product for each head.
    """

    _fields_ = [
        ("num_heads", _Int),
        ("latent", _Int),
        ("rotary_size", _Int),
        ("plain_size", _Int),
        ("value_size", _Int),
        ("order", _Int),
        ("up", Linear),
        ("absorb", ctypes.POINTER(Linear)),
        ("expand", ctypes.POINTER(Linear)),
        ("query_eps", ctypes.c_float),
        ("key_eps", ctypes.c_float),
    ]


class LayerEmbedding(ctypes.Structure):
    """Embedding of token ids that a layer adds to its output. All fields are 0 if the layer has none."""

    _fields_ = [("gate", Linear), ("projection", Linear), ("norm", _Pointer)]


class LayerInputs(ctypes.Structure):
    """Inputs of the embeddings of token ids in all layers: ``size`` numbers for each layer. All fields are 0 if the
    layers have no such embeddings.
    """

    _fields_ = [("size", _Int), ("projection", Linear), ("norm", _Pointer), ("eps", ctypes.c_float)]


class Layer(ctypes.Structure):
    """Decoder layer. Norms that the layer does not have are null. ``rotary`` is the index of the layer's rotary
    embedding among the step's rotary embeddings. A recurrent layer and a layer with latent attention have no heads.
    """

    _fields_ = [
        ("input_norm", _Pointer),
        ("attention_out_norm", _Pointer),
        ("mlp_norm", _Pointer),
        ("mlp_out_norm", _Pointer),
        ("query_norm", _Pointer),
        ("key_norm", _Pointer),
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("mixture", Mixture),
        ("params", Params),
        ("num_heads", _Int),
        ("num_kv_heads", _Int),
        ("head_size", _Int),
        ("rotary", _Int),
        ("gated", _Int),
        ("norms_values", _Int),
        ("keys_as_values", _Int),
        ("shares", _Int),
        ("alone", _Int),
        ("parallel", _Int),
        ("attention_factor", ctypes.c_float),
        ("mlp_factor", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("recurrence", Recurrence),
        ("latent", Latent),
        ("embedding", LayerEmbedding),
    ]


class Exchange(ctypes.Structure):
    """Shared memory through which ``size`` ranks exchange data in pieces of ``piece`` bytes. Null for a single rank."""

    _fields_ = [("base", _Pointer), ("rank", _Int), ("size", _Int), ("piece", _Int)]


class Fusion(ctypes.Structure):
    """Computation of the first layer's input in an EAGLE head, which proposes drafts, from embeddings of tokens and
    hidden states. All fields are 0 for other models.
    """

    _fields_ = [
        ("fc", Linear),
        ("embedding_norm", _Pointer),
        ("state_norm", _Pointer),
        ("normed_residual", _Int),
    ]


class Model(ctypes.Structure):
    """Decoder model: its layers, last norm and head."""

    _fields_ = [
        ("num_layers", _Int),
        ("hidden", _Int),
        ("intermediate", _Int),
        ("activation", _Int),
        ("norms_all_heads", _Int),
        ("norms_rotated", _Int),
        ("pairs", _Int),
        ("centers", _Int),
        ("eps", ctypes.c_float),
        ("logit_softcap", ctypes.c_float),
        ("layers", ctypes.POINTER(Layer)),
        ("final_norm", _Pointer),
        ("head", Linear),
        ("exchange", Exchange),
        ("fusion", Fusion),
        ("layer_inputs", LayerInputs),
    ]


class Group(ctypes.Structure):
    """Block table and slots of a step's requests in one KV cache group."""

    _fields_ = [("slots", _Pointer), ("block_table", _Pointer), ("table_stride", _Int), ("block_size", _Int)]


class Rotary(ctypes.Structure):
    """Cosines and sines of a rotary embedding, and factors of queries or null, by position. ``size`` is the number of
    rotated elements of a head.
    """

    _fields_ = [("cosines", _Pointer), ("sines", _Pointer), ("query_scales", _Pointer), ("size", _Int)]


class LayerRows(ctypes.Structure):
    """Table with embeddings of token ids for all layers, and the rows of the step's tokens in this table."""

    _fields_ = [("table", _Pointer), ("kind", _Int), ("scale", ctypes.c_float), ("ids", _Pointer)]


class Step(ctypes.Structure):
    """Forward pass of a step, or the part of the forward pass from layer ``first`` to the attention of layer ``last``."""

    _fields_ = [
        ("num_tokens", _Int),
        ("num_requests", _Int),
        ("query_start", _Pointer),
        ("seq_lens", _Pointer),
        ("groups", ctypes.POINTER(Group)),
        ("layer_groups", _Pointer),
        ("caches", ctypes.POINTER(Cache)),
        ("x", _Pointer),
        ("token_ids", _Pointer),
        ("embedding", _Pointer),
        ("embedding_kind", _Int),
        ("embedding_scale", ctypes.c_float),
        ("positions", _Pointer),
        ("rotaries", ctypes.POINTER(Rotary)),
        ("num_rows", _Int),
        ("rows", _Pointer),
        ("logits", _Pointer),
        ("keep_states", _Int),
        ("first", _Int),
        ("last", _Int),
        ("mlp_input", _Pointer),
        ("mlp_output", _Pointer),
        ("sum_nanoseconds", _Pointer),
        ("num_kept", _Int),
        ("kept_layers", _Pointer),
        ("hidden", _Pointer),
        ("num_segments", _Int),
        ("segments", _Pointer),
        ("states", _Pointer),
        ("own_states", _Int),
        ("key_ends", _Pointer),
        ("windowed_ends", _Int),
        ("num_deepstack", _Int),
        ("deepstack", _Pointer),
        ("recurrent", ctypes.POINTER(StateStep)),
        ("memories", ctypes.POINTER(StateMemory)),
        ("layer_rows", LayerRows),
    ]


class Chain(ctypes.Structure):
    """Number of tokens to sample for each request after a step, and the sampling parameters of these tokens."""

    _fields_ = [
        ("num_drafts", _Int),
        ("num_groups", _Int),
        ("width", _Int),
        ("counts", _Pointer),
        ("positions", _Pointer),
        ("temperatures", _Pointer),
        ("uniforms", _Pointer),
        ("tokens", _Pointer),
        ("vocabulary", _Pointer),
    ]


class Route(ctypes.Structure):
    """Choice of the experts of each token from the logits of a router, and the experts' weights."""

    _fields_ = [
        ("num_tokens", _Int),
        ("routing", Routing),
        ("logits", _Pointer),
        ("stride", _Int),
        ("experts", _Pointer),
        ("weights", _Pointer),
    ]


class Attention(ctypes.Structure):
    """Attention of a step over one layer's cache."""

    _fields_ = [
        ("num_requests", _Int),
        ("query_start", _Pointer),
        ("seq_lens", _Pointer),
        ("group", Group),
        ("cache", Cache),
        ("params", Params),
        ("num_heads", _Int),
        ("num_kv_heads", _Int),
        ("head_size", _Int),
        ("value_size", _Int),
        ("query", _Pointer),
        ("query_stride", _Int),
        ("output", _Pointer),
        ("output_stride", _Int),
        ("key_ends", _Pointer),
    ]


class Write(ctypes.Structure):
    """New keys and values of a layer that are written into the layer's KV cache."""

    _fields_ = [
        ("num_tokens", _Int),
        ("slots", _Pointer),
        ("cache", Cache),
        ("num_kv_heads", _Int),
        ("head_size", _Int),
        ("value_size", _Int),
        ("keys", _Pointer),
        ("key_stride", _Int),
        ("values", _Pointer),
        ("value_stride", _Int),
    ]


class Sampling(ctypes.Structure):
    """Rows of logits from which tokens are sampled."""

    _fields_ = [
        ("rows", _Int),
        ("width", _Int),
        ("logits", _Pointer),
        ("temperatures", _Pointer),
        ("uniforms", _Pointer),
        ("peaks", _Pointer),
        ("columns", _Pointer),
    ]


class Mask(ctypes.Structure):
    """Rows of logits in which a grammar allows only some tokens."""

    _fields_ = [
        ("count", _Int),
        ("width", _Int),
        ("logits", _Pointer),
        ("rows", _Pointer),
        ("bits", _Pointer),
        ("words", _Int),
    ]


class Convolution(ctypes.Structure):
    """Causal convolution of a recurrent layer."""

    _fields_ = [
        ("memory", StateMemory),
        ("weight", _Pointer),
        ("bias", _Pointer),
        ("silu", _Int),
        ("x", _Pointer),
        ("stride", _Int),
        ("out", _Pointer),
        ("out_stride", _Int),
    ]


class Scan(ctypes.Structure):
    """Linear recurrence of a recurrent layer."""

    _fields_ = [
        ("memory", StateMemory),
        ("query", _Pointer),
        ("query_stride", _Int),
        ("key", _Pointer),
        ("key_stride", _Int),
        ("value", _Pointer),
        ("value_stride", _Int),
        ("decay", _Pointer),
        ("decay_stride", _Int),
        ("beta", _Pointer),
        ("beta_stride", _Int),
        ("rates", _Pointer),
        ("out", _Pointer),
        ("out_stride", _Int),
    ]


ALL: tuple[type[Any], ...] = (
    Linear,
    Cache,
    Params,
    Layer,
    Model,
    Group,
    Step,
    Attention,
    Write,
    Sampling,
    Mask,
    Grouped,
    Mixture,
    Rotary,
    Route,
    Chain,
    Fusion,
    Update,
    Segment,
    StateMemory,
    StateSequence,
    StateWrite,
    StateStep,
    Convolution,
    Scan,
)
"""All structs, in the order in which the library's function ``penstock_sizes`` reports their sizes."""
