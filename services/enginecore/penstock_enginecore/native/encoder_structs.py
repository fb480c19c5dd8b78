"""Structs of encoders that are passed to the CPU kernels, with the same fields in the same order as in
``csrc/encoder_model.h``.
"""

import ctypes
from typing import Any

from penstock_enginecore.native.ffi_structs import Linear, Params

_Int = ctypes.c_int64
_Pointer = ctypes.c_void_p


class EncoderLayer(ctypes.Structure):
    """Layer of an encoder: its products, norms and attention parameters, and the tables of its rotary embedding."""

    _fields_ = [
        ("qkv", Linear),
        ("output", Linear),
        ("up", Linear),
        ("down", Linear),
        ("attention_norm", _Pointer),
        ("mlp_norm", _Pointer),
        ("params", Params),
        ("cosines", _Pointer),
        ("sines", _Pointer),
        ("rotary_size", _Int),
    ]


class EncoderModel(ctypes.Structure):
    """Encoder: the layers, the form of layers and norms, and the tables of embeddings. Pointers to norms and tables may
    be null.
    """

    _fields_ = [
        ("layers", ctypes.POINTER(EncoderLayer)),
        ("num_layers", _Int),
        ("hidden", _Int),
        ("intermediate", _Int),
        ("num_heads", _Int),
        ("num_kv_heads", _Int),
        ("head_size", _Int),
        ("activation", _Int),
        ("gated", _Int),
        ("post_norm", _Int),
        ("centers", _Int),
        ("pairs", _Int),
        ("half_words", _Int),
        ("eps", ctypes.c_float),
        ("embedding_eps", ctypes.c_float),
        ("words", _Pointer),
        ("types", _Pointer),
        ("positions", _Pointer),
        ("embedding_norm", _Pointer),
        ("final_norm", _Pointer),
    ]


class EncoderStep(ctypes.Structure):
    """Texts of a step, and the memory for their hidden states."""

    _fields_ = [
        ("num_tokens", _Int),
        ("num_texts", _Int),
        ("starts", _Pointer),
        ("token_ids", _Pointer),
        ("type_ids", _Pointer),
        ("position_ids", _Pointer),
        ("num_attended", _Pointer),
        ("x", _Pointer),
    ]


ALL: tuple[type[Any], ...] = (EncoderLayer, EncoderModel, EncoderStep)
"""All structs, in the order in which the library's function ``penstock_sizes`` reports their sizes, after those of
``ffi_structs``.
"""
