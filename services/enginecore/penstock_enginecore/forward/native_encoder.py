"""Forward pass of encoders that runs in the CPU kernels: one call per step, for texts of different lengths without
padding. The result of a text does not depend on the other texts of the step.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from penstock_enginecore.forward.backbone import BackboneBatch, BackboneSpecs
from penstock_enginecore.forward.equivalence_check import Candidate
from penstock_enginecore.forward.native_layers import empty
from penstock_enginecore.forward.native_support import ACTIVATIONS, GATE_ACTIVATIONS
from penstock_enginecore.models.dtypes import NarrowWeight, widened
from penstock_enginecore.models.encoder import encoder_inputs
from penstock_enginecore.models.encoder_plan import EncoderPlan, plan_encoder
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.native.attention import MAX_HEAD_SIZE
from penstock_enginecore.native.encoder_structs import EncoderLayer, EncoderModel, EncoderStep
from penstock_enginecore.native.ffi_structs import Params
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import PackedWeight
from penstock_enginecore.pooling.embedder import PoolingModel

T = TypeVar("T")

_PROBE_LENGTHS = (1, 7, 16, 33, 150)
"""Lengths of the texts with which encoders are compared, in tokens. They end before, at and after the ends of the
kernels' tiles of keys.
"""


def probe_texts(model: PoolingModel) -> BackboneBatch:
    """Return a step with texts of different lengths, with which implementations of an encoder are compared."""
    lengths = [min(length, model.max_len) for length in _PROBE_LENGTHS]
    starts = np.cumsum([0, *lengths])
    return BackboneBatch(
        token_ids=np.arange(1, starts[-1] + 1) * 7919 % model.vocab_size,
        positions=np.concatenate([np.arange(length) for length in lengths]),
        token_types=np.concatenate([(np.arange(length) >= length // 2).astype(np.int64) for length in lengths]),
        query_start_loc=starts,
    )


class NativeEncoder:
    """Layers and embeddings of an encoder in the CPU kernels. The constructor packs copies of the weights.

    Raises UnsuitableError if the kernels do not support the model.
    """

    def __init__(self, library: NativeLibrary, model: PoolingModel, specs: BackboneSpecs) -> None:
        self._library = library
        self._module: Any = model.module
        self._plan = plan = plan_encoder(model.module, specs.calls)
        if reason := _unsuitable(library, plan):
            raise UnsuitableError(reason)
        self._kept: list[torch.Tensor] = []
        self._packed: list[PackedWeight] = []
        rotaries = [rotary(model.max_len) for rotary in plan.rotaries]
        for tables in rotaries:
            self._kept += tables
        self._hidden = plan.words.weight.shape[1]
        layers = (EncoderLayer * len(plan.layers))()
        for struct, layer in zip(layers, plan.layers, strict=True):
            struct.qkv = self._pack(layer.qkv)
            struct.output = self._pack([layer.output])
            struct.up = self._pack(layer.up)
            struct.down = self._pack([layer.down])
            struct.attention_norm = self._norm(layer.attention_norm)
            struct.mlp_norm = self._norm(layer.mlp_norm)
            struct.params = Params(layer.window or 0, 0, layer.scaling, 0.0, None)
            if layer.rotary is not None:
                cosines, sines = rotaries[layer.rotary]
                struct.cosines, struct.sines = cosines.data_ptr(), sines.data_ptr()
                struct.rotary_size = cosines.shape[1]
        words = self._words(plan.words)
        numbers = GATE_ACTIVATIONS if plan.gated and plan.activation == "silu" else ACTIVATIONS
        struct = EncoderModel(
            layers=layers,
            num_layers=len(layers),
            hidden=self._hidden,
            intermediate=plan.layers[0].down.in_features,
            num_heads=plan.num_heads,
            num_kv_heads=plan.num_kv_heads,
            head_size=plan.head_size,
            activation=numbers[plan.activation],
            gated=plan.gated,
            post_norm=plan.post_norm,
            centers=_is_centered(plan.norms[0]),
            pairs=library.rounds_to is torch.bfloat16,
            half_words=words.dtype == torch.bfloat16,
            eps=_eps(plan.norms[0]),
            embedding_eps=0.0 if plan.embedding_norm is None else _eps(plan.embedding_norm),
            words=words.data_ptr(),
            types=self._table(plan.types),
            positions=self._table(plan.positions),
            embedding_norm=self._norm(plan.embedding_norm),
            final_norm=self._norm(plan.final_norm),
        )
        self._handle = ctypes.c_void_p()
        library.call("encoder_new", ctypes.byref(struct), ctypes.byref(self._handle))
        library.free_with(self, self._handle, "encoder")

    @property
    def num_bytes(self) -> int:
        """Size in bytes of packed weights, norms and tables."""
        return sum(weight.num_bytes for weight in self._packed) + sum(kept.nbytes for kept in self._kept)

    def __call__(self, batch: BackboneBatch) -> torch.Tensor:
        """Return the hidden states float32 ``[tokens, hidden size]`` of ``batch`` after the last layer's norm."""
        inputs = encoder_inputs(self._module.config, batch.positions, batch.token_types)
        token_ids, starts = (np.ascontiguousarray(array) for array in (batch.token_ids, batch.query_start_loc))
        types = inputs.get("token_type_ids")
        if types is None:  # without types in its input, a model's embeddings use type 0
            types = torch.zeros(len(token_ids), dtype=torch.int64)
        self._check(token_ids)
        attended = None if batch.num_attended is None else np.ascontiguousarray(batch.num_attended)
        hidden = torch.empty(len(token_ids), self._hidden)
        step = EncoderStep(
            len(token_ids),
            len(starts) - 1,
            starts.ctypes.data,
            token_ids.ctypes.data,
            types.data_ptr(),
            inputs["position_ids"].data_ptr(),
            None if attended is None else attended.ctypes.data,
            hidden.data_ptr(),
        )
        self._library.call_on(self._handle, "encoder_forward", ctypes.byref(step))
        return hidden

    def free_modules(self) -> None:
        """Free the weights of the modules that this object replaces."""
        for layer in self._plan.layers:
            for linear in layer.linears:
                empty(linear)
        words = self._plan.words
        words.weight = torch.nn.Parameter(torch.empty(0, self._hidden), requires_grad=False)

    def _check(self, token_ids: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
        """Raise IndexError if a token id is out of range, because the kernels would read other memory."""
        size = self._plan.words.num_embeddings
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < size:
            raise IndexError(f"a token id is out of range: the model has the token ids 0 to {size - 1}")

    def _pack(self, linears: Sequence[Any]) -> Any:
        weight: torch.Tensor = linears[0].weight
        if len(linears) > 1:
            weight = torch.cat([widened(linear.weight.detach()).float() for linear in linears])
        bias = None
        if any(linear.bias is not None for linear in linears):
            parts = [
                torch.zeros(linear.out_features) if linear.bias is None else widened(linear.bias.detach()).float()
                for linear in linears
            ]
            bias = torch.cat(parts)
        packed = PackedWeight(self._library, weight, bias, halved=True)
        self._packed.append(packed)
        return packed.struct

    def _norm(self, norm: Any) -> int | None:
        """Return the address of a norm's weights, followed by its biases, or None without a norm."""
        if norm is None:
            return None
        weight = widened(norm.weight.detach()).float()
        bias = getattr(norm, "bias", None)
        bias = torch.zeros_like(weight) if bias is None else widened(bias.detach()).float()
        return self._keep(torch.cat([weight, bias]))

    def _table(self, embedding: torch.nn.Embedding | None) -> int | None:
        return None if embedding is None else self._keep(widened(embedding.weight.detach()).float().contiguous())

    def _words(self, embedding: torch.nn.Embedding) -> torch.Tensor:
        weight: torch.Tensor = embedding.weight.detach()
        if isinstance(weight, NarrowWeight) and weight.kept.dtype == torch.bfloat16:
            table = weight.kept.clone()  # so that the checkpoint's file can be closed
        else:
            table = widened(weight).float().contiguous()
        self._keep(table)
        return table

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


class _EncoderReplacement:
    """``Replacement`` of an encoder's modules by the kernels."""

    def __init__(self, encoder: NativeEncoder, batch: BackboneBatch, serve: Callable[[NativeEncoder], T]) -> None:
        self._encoder = encoder
        self._batch = batch
        self._serve = serve

    def probe(self) -> torch.Tensor:
        """Return the hidden states of the texts that implementations are compared with."""
        return self._encoder(self._batch)

    def where(self) -> str:
        """Return an empty text, because all layers are computed in one call."""
        return ""

    def take_over(self) -> Any:
        """Free the weights of the modules, and return the implementation that serves requests."""
        self._encoder.free_modules()
        return self._serve(self._encoder)

    def undo(self) -> None:
        """Do nothing, because the modules are unchanged."""


def encoder_candidate(
    library: NativeLibrary,
    model: PoolingModel,
    specs: BackboneSpecs,
    serve: Callable[[NativeEncoder], T],
    refused: str | None = None,
) -> Candidate[T]:
    """Return a candidate that computes an encoder in the CPU kernels.

    Args:
        library: The CPU kernels.
        model: The encoder.
        specs: Result of ``probe_specs`` for the encoder.
        serve: Function that creates the implementation that serves requests.
        refused: Reason why settings exclude the kernels, or None.
    """

    def build() -> _EncoderReplacement:
        if refused is not None:
            raise UnsuitableError(refused)
        return _EncoderReplacement(NativeEncoder(library, model, specs), probe_texts(model), serve)

    return Candidate("encoder", build, library.rounds_to)


def _unsuitable(library: NativeLibrary, plan: EncoderPlan) -> str | None:
    lanes = library.lanes
    if plan.head_size % lanes or plan.head_size > MAX_HEAD_SIZE:
        return f"a head size of {plan.head_size} is not a multiple of {lanes} up to {MAX_HEAD_SIZE}"
    if plan.num_heads % plan.num_kv_heads:
        return f"{plan.num_heads} heads cannot share {plan.num_kv_heads} key heads"
    norms = {(type(norm), _eps(norm)) for norm in plan.norms}
    if len(norms) > 1:
        return "the model's norms have different types or epsilons"
    if plan.activation not in (*ACTIVATIONS, "silu") or (plan.activation == "silu" and not plan.gated):
        return f"the MLPs use the activation function {plan.activation}, which the kernels do not support"
    if len({tuple(linear.weight.shape for linear in layer.linears) for layer in plan.layers}) > 1:
        return "the model's layers have different shapes"
    return None


def _is_centered(norm: torch.nn.Module) -> bool:
    """Return whether a norm subtracts the mean."""
    return isinstance(norm, torch.nn.LayerNorm)


def _eps(norm: Any) -> float:
    return float(norm.eps if isinstance(norm, torch.nn.LayerNorm) else norm.variance_epsilon)
