"""Interface of a language model's forward pass: its inputs, its outputs and the protocol that every implementation
follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.attention.kv_cache import KVMemory, LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.lora.adapter import LoraSegment
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.layer_embeddings import has_layer_embeddings
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.sample.base import LaunchedTokens, PlainDraws
from penstock_enginecore.states.base import StateMetadata
from penstock_enginecore.states.memory import StateLayers, StateMemory


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return ``array`` on ``device``. A copy to a GPU is queued after the GPU's current work, and the host does not
    wait for the copy.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


# Inputs that only the steps of multimodal models have.


@dataclass(frozen=True, slots=True)
class MediaDemands:
    """Additional inputs that the steps of a multimodal model need; see ``ForwardBatch`` and ``AttentionMetadata``.

    Attributes:
        sections: Whether some steps have ``rope_positions``, for rotary embeddings with sections.
        num_deepstack: Number of layers in ``ForwardBatch.deepstack``, or 0 if steps have no ``deepstack``.
        spans: Whether some steps have ``key_ends``, for images with bidirectional attention.
        layer_ids: Whether steps with ``embedded`` also need token ids, for embeddings in each layer.
        windowed_spans: Whether these ``key_ends`` apply only to layers with a sliding window.
    """

    sections: bool = False
    num_deepstack: int = 0
    spans: bool = False
    layer_ids: bool = False
    windowed_spans: bool = False

    def __bool__(self) -> bool:
        return self.sections or self.num_deepstack > 0 or self.spans or self.layer_ids

    def __str__(self) -> str:
        """Return the names of the inputs, for error messages about unsupported inputs."""
        named = {
            "rotary positions in sections": self.sections,
            "embeddings added after the first layers": self.num_deepstack > 0,
            "images with bidirectional attention": self.spans,
            "embeddings of token ids in each layer": self.layer_ids,
        }
        return " and ".join(name for name, is_so in named.items() if is_so)


NO_DEMANDS = MediaDemands()


def demands_of(model: LoadedModel) -> MediaDemands:
    """Return the additional inputs that the model's media encoders need. Raises ModelLoadError if the model's modules
    would ignore these inputs.
    """
    encoder = model.encoder
    if encoder is None:
        return NO_DEMANDS
    spans = any(info.attends_both_ways for info in encoder.media)
    base: Any = model.module.base_model
    demands = MediaDemands(
        encoder.rope_positions is not None,
        encoder.num_deepstack,
        spans,
        layer_ids=has_layer_embeddings(base),
        windowed_spans=spans and encoder.windowed_spans,
    )
    if demands.sections and not any(hasattr(module, "mrope_section") for module in base.modules()):
        raise ModelLoadError(
            f"cannot serve {type(base).__name__} with media: its rotary embedding does not support sections"
        )
    if demands.num_deepstack and not hasattr(base, "_deepstack_process"):
        raise ModelLoadError(
            f"cannot serve {type(base).__name__} with media: its layers do not add deepstack embeddings"
        )
    return demands


@dataclass(frozen=True, slots=True)
class FedTokens:
    """Input tokens of a step that the device has sampled and the host has not received yet.

    Attributes:
        newest: int32 on the device, the newest token of each request row.
        places: int64 ``[n]``, indices of these tokens in the flat batch.
        rows: int64 ``[n]``, rows of ``newest`` that contain these tokens.
    """

    newest: torch.Tensor
    places: IntArray
    rows: IntArray

    def write(self, token_ids: torch.Tensor) -> None:
        """Write the ids of these tokens into ``token_ids`` ``[tokens]``, an integer tensor on the device."""
        places, rows = to_device(np.stack([self.places, self.rows]), token_ids.device)
        token_ids.index_copy_(0, places, self.newest.index_select(0, rows).to(token_ids.dtype))


@dataclass(frozen=True, slots=True)
class Choice:
    """Arguments for sampling on the device, directly after the device has computed a step's logits.

    Attributes:
        draws: Sampling parameters of the rows of logits.
        newest: int32 tensor that receives the sampled tokens. The last entry of ``newest`` belongs to no request.
        kept_rows: int64 ``[rows]``, for each row of logits the index in ``newest`` to write.
    """

    draws: PlainDraws
    newest: torch.Tensor
    kept_rows: IntArray


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of a step, in flat arrays on the host that join the tokens of all requests.

    Attributes:
        token_ids: int64 ``[tokens]``. Models with embeddings in each layer read the ids even if ``embedded`` is set.
        positions: int64 ``[tokens]``.
        attention: Attention metadata of each KV cache group.
        embedded: ``[tokens, hidden size]``, replaces the token ids if some inputs are embeddings. The caller creates
            this tensor with ``ForwardPass.embed`` and then changes rows. The forward pass may overwrite the tensor.
        fed: Tokens whose ids are only on the device, so ``token_ids`` does not contain these ids. Never set together
            with ``embedded``.
        choice: Sampling arguments for a forward pass that can sample. Other forward passes ignore ``choice``, and the
            caller samples.
        segments: Ranges of tokens with LoRA adapters, for an ``AdaptedForward``.
        rope_positions: int64 ``[3, tokens]``, time, height and width positions for rotary embeddings with sections (M-RoPE).
            If None, all three are ``positions``.
        deepstack: ``[layers, tokens, hidden size]`` on the device, added to the hidden states after each of the first layers.
            Only set together with ``embedded``.
        states: The recurrent states of each request, for a ``StatefulForward``.
        replaced: int64 ``[n]`` on the device, indices of the tokens whose rows in ``embedded`` are not the embeddings of
            their ids, or None if there are none.
    """

    token_ids: IntArray
    positions: IntArray
    attention: Sequence[AttentionMetadata]
    embedded: torch.Tensor | None = None
    fed: FedTokens | None = None
    choice: Choice | None = None
    segments: Sequence[LoraSegment] = ()
    rope_positions: IntArray | None = None
    deepstack: torch.Tensor | None = None
    states: StateMetadata | None = None
    replaced: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Result of a forward pass.

    Attributes:
        logits: ``[rows, vocab]``.
        states: Argument for ``ForwardPass.head``, or None if ``keep_states`` was false.
        launched: The sampled tokens, or None if the forward pass did not sample.
        hidden: ``[tokens, layers * hidden size]``, the hidden states that ``ForwardPass.keep_hidden`` selected,
            concatenated. Each forward pass returns a new tensor.
    """

    logits: torch.Tensor
    states: Any = None
    launched: LaunchedTokens | None = None
    hidden: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ChainedDraws:
    """Sampling parameters for the tokens that ``ChainedForward.chain`` samples for the first requests of a step.
    Filters (min_p, top_k, top_p) are not supported.

    Attributes:
        counts: int64 ``[requests]``, number of tokens to sample for each request: at least 1, and in descending order.
        temperature: float32 ``[requests]``, 0 is greedy.
        uniforms: float64 ``[counts[0], requests]``, random numbers for the sampled tokens.
        vocab_size: Number of logits per row to sample from.
    """

    counts: IntArray
    temperature: npt.NDArray[np.float32]
    uniforms: npt.NDArray[np.float64]
    vocab_size: int


@runtime_checkable
class ChainedForward(Protocol):
    """Optional interface of a forward pass that can compute several steps in one call, each from the tokens that the
    previous step sampled.
    """

    @property
    def chains(self) -> bool:
        """Whether the forward pass supports ``chain`` for its model."""

    def chain(self, batch: ForwardBatch, draws: ChainedDraws) -> IntArray:
        """Compute a step's tokens, sample a token for each of the step's first ``requests`` requests, compute these
        tokens, and so on.

        The last token of each request is sampled, but not computed. The block tables must cover all sampled tokens.
        Returns the tokens, int64 ``[counts[0], requests]``, with 0 after a request's last token.
        """


@runtime_checkable
class StatefulForward(Protocol):
    """Optional interface of a forward pass that can compute recurrent layers."""

    @property
    def states(self) -> StateMemory:
        """Allocator of memory for recurrent states. The allocator's ``specs`` are empty for a model without recurrent
        layers.
        """

    def bind_states(self, layers: StateLayers) -> None:
        """Keep recurrent states in the memory ``layers`` from now on. An empty dictionary drops the references to the
        current memory.
        """


def state_memory(forward: object) -> StateMemory | None:
    """Return the allocator of memory for a forward pass's recurrent states, or None for a model without recurrent
    layers.
    """
    return forward.states if isinstance(forward, StatefulForward) and forward.states.specs else None


@runtime_checkable
class KeptWeights(Protocol):
    """Optional interface of a forward pass whose weights can leave the device and return to the same addresses."""

    def weights(self) -> list[torch.Tensor]:
        """Return all tensors that depend on the checkpoint, in the model's order."""

    def read(self, model: LoadedModel) -> None:
        """Copy the weights of ``model`` into this forward pass's tensors. ``model`` is the same checkpoint on the host,
        and cannot be used afterwards.
        """


class ForwardPass(Protocol):
    """Embedding, layers and head of a model on its device. Steps run one at a time, with gradients off.

    Call ``bind`` before the first step. ``build_forward`` creates an implementation from the loaded checkpoint. Before
    an implementation serves requests, ``build_forward`` compares its results with the results of the model's own
    modules.
    """

    device: torch.device

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """KV cache spec of each attention layer, by layer name in execution order."""

    @property
    def memory(self) -> KVMemory:
        """Allocator of KV caches for ``bind``, in the layouts that the forward pass uses."""

    @property
    def separate_head(self) -> bool:
        """Whether ``head`` can be called. If false, the argument ``rows`` of ``run`` must include all rows whose logits
        are needed.
        """

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the weights, including packed weights."""

    def bind(self, caches: LayerCaches) -> None:
        """Use the KV cache ``caches`` from now on. An empty ``caches`` drops the references to the current KV cache."""

    def embed(self, token_ids: IntArray) -> torch.Tensor:
        """Return the first layer's input for ``token_ids``, int64 ``[tokens]``: a new tensor ``[tokens, hidden size]``
        on the device.
        """

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """Make ``run`` return the hidden states of these layers from the next run on.

        Layers are numbered as in transformers: ``i`` is the input of layer i, and the number of layers is the output of
        the last norm.
        """

    def run(self, batch: ForwardBatch, rows: IntArray, *, keep_states: bool = False) -> ForwardOutput:
        """Compute a step's tokens and write their keys and values. Returns the logits of the tokens with the indices
        ``rows`` (int64) in the flat batch.
        """

    def head(self, states: Any, rows: torch.Tensor) -> torch.Tensor:
        """Return logits ``[len(rows), vocab]`` for the tokens with the indices ``rows`` in the flat batch that produced
        ``states``. ``rows`` is int64 on the device.
        """

    def to(self, device: torch.device) -> None:
        """Move the weights: off the device before the engine sleeps, and back when it wakes up."""
