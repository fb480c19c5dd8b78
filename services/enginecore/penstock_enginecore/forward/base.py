"""The forward pass of a language model: what every build of it is, what it gets and what it gives."""

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
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.sample.base import LaunchedTokens, PlainDraws

# Arrays on their way to a device, for which nobody waits.


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """``array`` on ``device``. A copy to a GPU goes behind the work that is under way there, and the host waits for neither."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


# What steps of a model with towers have besides tokens and embeddings.


@dataclass(frozen=True, slots=True)
class MediaDemands:
    """Of a model's steps. ``sections``: some have ``rope_positions``. ``num_deepstack``: layers of their ``deepstack``, 0 for
    none. ``spans``: some have ``key_ends``. See ``ForwardBatch`` and ``AttentionMetadata``.
    """

    sections: bool = False
    num_deepstack: int = 0
    spans: bool = False

    def __bool__(self) -> bool:
        return self.sections or self.num_deepstack > 0 or self.spans

    def __str__(self) -> str:
        """For errors that say what is not served."""
        named = {
            "positions in sections": self.sections,
            "rows that are added behind its first layers": self.num_deepstack > 0,
            "images that attend both ways": self.spans,
        }
        return " and ".join(name for name, is_so in named.items() if is_so)


NO_DEMANDS = MediaDemands()


def demands_of(model: LoadedModel) -> MediaDemands:
    """Those of its towers. Raises ModelLoadError where its modules would take them for something else."""
    encoder = model.encoder
    if encoder is None:
        return NO_DEMANDS
    spans = any(info.attends_both_ways for info in encoder.media)
    demands = MediaDemands(encoder.rope_positions is not None, encoder.num_deepstack, spans)
    base: Any = model.module.base_model
    if demands.sections and not any(hasattr(module, "mrope_section") for module in base.modules()):
        raise ModelLoadError(f"{type(base).__name__} is not served with media: its rotary embedding has no sections")
    if demands.num_deepstack and not hasattr(base, "_deepstack_process"):
        raise ModelLoadError(f"{type(base).__name__} is not served with media: nothing is added behind its layers")
    return demands


@dataclass(frozen=True, slots=True)
class FedTokens:
    """Tokens that the device knows and the host does not: those of ``rows`` int64 ``[n]`` of ``newest`` int32, at ``places``
    int64 ``[n]`` of the flat batch.
    """

    newest: torch.Tensor
    places: IntArray
    rows: IntArray

    def write(self, token_ids: torch.Tensor) -> None:
        """Put them into ``token_ids`` ``[tokens]``, integers on the device."""
        places, rows = to_device(np.stack([self.places, self.rows]), token_ids.device)
        token_ids.index_copy_(0, places, self.newest.index_select(0, rows).to(token_ids.dtype))


@dataclass(frozen=True, slots=True)
class Choice:
    """How a step's tokens are to be chosen on the device, right behind its logits: by ``draws`` of the rows that get logits. They
    become the newest of ``kept_rows`` int64 ``[rows]`` of ``newest`` int32, whose last number is nobody's.
    """

    draws: PlainDraws
    newest: torch.Tensor
    kept_rows: IntArray


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of a step, flat, on the host: ``token_ids`` and ``positions`` int64 ``[tokens]``, ``attention`` one entry per
    KV cache group. ``embedded`` ``[tokens, hidden size]`` stands for the token ids where some of them are vectors: made by
    ``ForwardPass.embed``, then changed. It may be overwritten. ``fed``: tokens whose ids are not those of ``token_ids``; there
    are none beside ``embedded``. ``choice``: for a pass that can choose tokens itself; others leave that to whoever calls.
    ``segments``: the tokens that have adapters, for an ``AdaptedForward``.

    ``rope_positions`` int64 ``[3, tokens]``: where the tokens stand in time, height and width for rotary embeddings with
    sections (M-RoPE); None: at ``positions`` in all of them. ``deepstack`` ``[layers, tokens, hidden size]`` on the device: what
    is added to the hidden states behind each of the first layers; only beside ``embedded``.
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


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """``logits`` ``[rows, vocab]``. ``states``: what ``ForwardPass.head`` takes; None where they were not asked for.
    ``launched``: the tokens, where the pass was to choose them and did. ``hidden`` ``[tokens, layers * hidden size]``: what
    ``ForwardPass.keep_hidden`` asked for, side by side; a tensor of its own.
    """

    logits: torch.Tensor
    states: Any = None
    launched: LaunchedTokens | None = None
    hidden: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ChainedDraws:
    """How the first requests of a step go on behind it. ``counts`` int64 ``[requests]``: tokens to choose, one at least, of no
    request more than of the one before. ``temperature`` float32 ``[requests]``, 0 is greedy; ``uniforms`` float64
    ``[counts[0], requests]``; there are no filters. ``vocab_size``: how many of the logits tokens are chosen from.
    """

    counts: IntArray
    temperature: npt.NDArray[np.float32]
    uniforms: npt.NDArray[np.float64]
    vocab_size: int


@runtime_checkable
class ChainedForward(Protocol):
    """What a pass does besides that goes on from the tokens that it chooses, without anybody's asking for the steps between."""

    @property
    def chains(self) -> bool:
        """Whether it does so for its model."""

    def chain(self, batch: ForwardBatch, draws: ChainedDraws) -> IntArray:
        """Compute the tokens of a step, choose one behind the last of each of its first requests, compute these, and so on; the
        last ones are not computed. Block tables reach as far. Tokens int64 ``[counts[0], requests]``, 0 where none is wanted.
        """


@runtime_checkable
class KeptWeights(Protocol):
    """What a pass does besides whose weights may leave the device and come back to where they were."""

    def weights(self) -> list[torch.Tensor]:
        """All that depends on the checkpoint, in an order of the model's."""

    def read(self, model: LoadedModel) -> None:
        """Copy the weights of ``model``, the same checkpoint on the host, to where these are. It is used up."""


class ForwardPass(Protocol):
    """The embedding, layers and head of a model on its device. Steps run one at a time, with gradients off.

    ``bind`` comes before the first step. Each build is made from the loaded checkpoint and proved against the model's own
    modules before it serves, see ``build_forward``.
    """

    device: torch.device

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """What each attention layer asks of the KV cache, by layer name in execution order."""

    @property
    def memory(self) -> KVMemory:
        """Allocates KV caches for ``bind``, in the layouts that the pass keeps them in."""

    @property
    def separate_head(self) -> bool:
        """Whether ``head`` can be called; else ``run`` must be given all rows whose logits are wanted."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, packed ones included."""

    def bind(self, caches: LayerCaches) -> None:
        """Run on this KV cache from now on. An empty one lets go of that before."""

    def embed(self, token_ids: IntArray) -> torch.Tensor:
        """``[tokens, hidden size]`` on the device, a new tensor: what the first layer gets for int64 ``[tokens]``."""

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """Give hidden states of the tokens from the next run on, as transformers counts them: ``i`` is what comes into layer i,
        the number of layers what the last norm puts out.
        """

    def run(self, batch: ForwardBatch, rows: IntArray, *, keep_states: bool = False) -> ForwardOutput:
        """Compute the tokens of a step and write their keys and values. Logits of ``rows`` (int64) of the flat batch."""

    def head(self, states: Any, rows: torch.Tensor) -> torch.Tensor:
        """Logits ``[len(rows), vocab]`` at ``rows`` (int64, on the device) of the flat batch of the run that gave ``states``."""

    def to(self, device: torch.device) -> None:
        """Move the weights: away from the device while the engine sleeps, and back."""
