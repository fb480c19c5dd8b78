"""``MediaEncoder`` for all supported models. The encoder has a queue of items and computes the first item block by
block.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.activations import QuickGELUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from penstock_common.types.media import EMBEDS, Modality
from penstock_enginecore.core.model_info import MediaInfo
from penstock_enginecore.models.multimodal.base import (
    FLOATS,
    EncodedItem,
    EncoderItem,
    ItemError,
    Spec,
    read_tensors,
    to_data,
)
from penstock_enginecore.models.multimodal.families.base import Family

# Computation of a media encoder a few blocks at a time, between forward passes of the text model.


class SlicedRun:
    """Run of a media encoder that pauses after a given number of blocks.

    The encoder's forward pass runs in a greenlet with separate context variables. All calls must come from the same
    thread. torch's modes belong to a thread and not to a greenlet, so each call enters inference mode.
    """

    def __init__(self, compute: Callable[[], torch.Tensor], num_blocks: int) -> None:
        self._greenlet = _BlockGreenlet(compute, num_blocks)

    @property
    def blocks_left(self) -> int:
        """Number of blocks that are not computed yet."""
        return self._greenlet.blocks_left

    @torch.inference_mode()
    def advance(self, num_blocks: int) -> torch.Tensor | None:
        """Compute up to ``num_blocks`` blocks, and return the result after the last block, or None if blocks remain.
        The first call also computes the encoder's layers before the blocks, and the last call computes the layers after
        the blocks. Raises the errors of the encoder.
        """
        run = self._greenlet
        run.allowed = num_blocks
        run.parent = getcurrent()
        found: torch.Tensor | None = run.switch()
        return found if run.dead else None

    def stop(self) -> None:
        """Abort the encoder's forward pass."""
        self._greenlet.parent = getcurrent()
        self._greenlet.throw(GreenletExit)


class _BlockGreenlet(greenlet):  # type: ignore[misc]  # greenlet has no type hints
    """Greenlet that returns to its parent after ``allowed`` blocks."""

    def __init__(self, compute: Callable[[], torch.Tensor], num_blocks: int) -> None:
        super().__init__(compute)
        self.gr_context = copy_context()
        self.blocks_left = num_blocks
        self.allowed = 0

    def pass_block(self) -> None:
        """Count a computed block, and return to the parent greenlet if no more blocks are allowed."""
        self.blocks_left -= 1
        self.allowed -= 1
        if self.allowed <= 0 and self.blocks_left > 0 and self.parent is not None:
            self.parent.switch(None)


def hook_blocks(blocks: Iterable[torch.nn.Module]) -> None:
    """Add hooks to ``blocks`` that report each computed block to the current run, if there is one."""
    for block in blocks:
        block.register_forward_hook(_passed)


def _passed(module: torch.nn.Module, inputs: object, output: object) -> None:  # noqa: ARG001 - torch's signature
    current = getcurrent()
    if isinstance(current, _BlockGreenlet):
        current.pass_block()


# Hendrycks' quick GELU, ``x * sigmoid(1.702 x)``, as used by CLIP and Qwen2-VL. This version fills only one buffer.


class QuickGELU(torch.nn.Module):
    """Quick GELU, bit-identical to transformers' module.

    transformers' module fills three buffers of the input's size. For a large image on a CPU, allocating their pages
    takes seven times as long as the arithmetic.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the quick GELU of each element of ``x``, of any shape."""
        return (x * 1.702).sigmoid_().mul_(x)


def use_quick_gelu(tower: torch.nn.Module) -> None:
    """Replace transformers' quick GELU modules in the encoder ``tower``."""
    for parent in list(tower.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is QuickGELUActivation:
                setattr(parent, name, QuickGELU())


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Begun:
    """Item whose computation has started."""

    item: EncoderItem
    run: SlicedRun

    @property
    def block_cost(self) -> int:
        """Cost of computing one block of the item, as a number of embeddings."""
        return max(self.item.num_embeds, 1)


class TowerEncoder:
    """Media encoders of ``family``, computed in slices.

    Items are computed one at a time. In a batch of items, results could differ in some bits, because libraries choose
    algorithms by the size of a tensor.
    """

    def __init__(self, family: Family, device: torch.device, dtype: torch.dtype) -> None:
        self._family = family
        self._device = device
        self._dtype = dtype
        self._waiting: dict[str, EncoderItem] = {}
        self._begun: _Begun | None = None
        self.media: Sequence[MediaInfo] = [
            intake.info(len(family.blocks_of(modality))) for modality, intake in family.by_modality.items()
        ]
        self.width = family.width * (1 + family.num_deepstack)
        self.num_deepstack = family.num_deepstack
        self.windowed_spans = family.windowed_spans
        self.rope_positions = family.rope_index
        self.modules: Sequence[torch.nn.Module] = (family.towers,)
        use_quick_gelu(family.towers)
        hook_blocks(dict.fromkeys(block for modality in family.by_modality for block in family.blocks_of(modality)))

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def start(self, item: EncoderItem) -> None:
        """Add an item to the end of the queue, unless it is already in the queue."""
        self._waiting.setdefault(item.identifier, item)

    def drop(self, identifier: str) -> None:
        """Remove an item from the queue, and stop its computation."""
        self._waiting.pop(identifier, None)
        if self._begun is not None and self._begun.item.identifier == identifier:
            self._begun.run.stop()
            self._begun = None

    def advance(self, budget: int) -> list[EncodedItem]:
        done: list[EncodedItem] = []
        computed = False
        while self._waiting:
            item = next(iter(self._waiting.values()))
            try:
                if EMBEDS in item.data:
                    done.append(self._finish(item, self._given(item)))
                    continue
                begun = self._begin(item)
                blocks = min(max(budget, 0) // begun.block_cost, begun.run.blocks_left)
                if blocks == 0 and computed:
                    break
                before = begun.run.blocks_left
                rows = begun.run.advance(max(blocks, 1))
                budget -= (before - begun.run.blocks_left) * begun.block_cost
                computed = True
                if rows is None:
                    break
                done.append(self._finish(item, self._checked(item, rows)))
            except torch.AcceleratorError:
                raise  # an item does not cause a failure of the device, so raise the error
            except ItemError as e:
                done.append(self._fail(item, str(e)))
            except Exception as e:
                logger.warning("media encoder failed on a media item num_embeds=%d", item.num_embeds, exc_info=True)
                done.append(self._fail(item, f"the model's media encoder failed: {type(e).__name__}: {_first_line(e)}"))
        return done

    def largest(self, modality: Modality) -> EncoderItem:
        """Return an item of the largest size that the model accepts."""
        intake = self._family.by_modality[modality]
        tensors = intake.largest_tensors()
        data = {name: to_data(tensor) for name, tensor in tensors.items()}
        return EncoderItem(f"largest {modality}", modality, intake.count(tensors), data)

    def _begin(self, item: EncoderItem) -> _Begun:
        if self._begun is None:
            intake = self._family.by_modality.get(item.modality)
            if intake is None:
                raise ItemError(f"the model accepts {' and '.join(self._family.by_modality)}, but not {item.modality}")
            tensors = read_tensors(item.data, intake.specs)
            if (rows := intake.count(tensors)) != item.num_embeds:
                raise ItemError(
                    f"the tensors give {rows} embeddings, but the prompt has positions for {item.num_embeds}"
                )
            tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
            run = SlicedRun(lambda: intake.encode(tensors), len(self._family.blocks_of(item.modality)))
            self._begun = _Begun(item, run)
        return self._begun

    def _given(self, item: EncoderItem) -> torch.Tensor:
        """Return the embeddings that the client sent instead of the media."""
        spec = Spec(FLOATS, (item.num_embeds, self.width))
        return read_tensors(item.data, {EMBEDS: spec})[EMBEDS].to(self._device, self._dtype)

    def _checked(self, item: EncoderItem, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape != (item.num_embeds, self.width):
            raise ItemError(
                f"the model's media encoder returned {list(rows.shape)} instead of {[item.num_embeds, self.width]}"
            )
        return rows.to(self._dtype)

    def _finish(self, item: EncoderItem, rows: torch.Tensor) -> EncodedItem:
        self._forget(item)
        return EncodedItem(item.identifier, rows)

    def _fail(self, item: EncoderItem, why: str) -> EncodedItem:
        self._forget(item)
        return EncodedItem(item.identifier, None, why)

    def _forget(self, item: EncoderItem) -> None:
        self._begun = None
        del self._waiting[item.identifier]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


# Attention function of media encoders. It calls an implementation that ``attend_by`` registered, or else torch's.

_NAME = "penstock_towers"


class Attends(Protocol):
    """Implementation of bidirectional attention over complete sequences."""

    def takes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether this implementation supports tensors ``[sequences, heads, tokens, head size]`` of these shapes
        and dtypes.
        """

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the attention output ``[sequences, tokens, heads, value size]``."""


_attending: WeakKeyDictionary[torch.nn.Module, Attends] = WeakKeyDictionary()


def attend_by(tower: torch.nn.Module, attends: Attends) -> None:
    """Let ``attends`` compute the attention calls of ``tower`` that it supports. torch computes the other calls."""
    for module in tower.modules():
        config: Any = getattr(module, "config", None)
        # A configuration with several sections is also used by the text model, so do not change it.
        if getattr(config, "sub_configs", True) or config._attn_implementation != "sdpa":
            continue
        config._attn_implementation = _NAME
    for module in tower.modules():
        _attending[module] = attends


def _tower_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, with the signature of transformers' ``AttentionInterface``."""
    attends = _attending.get(module)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and not causal and others.get("position_bias") is None and not dropout
    if attends is not None and plain and attends.takes(query, key, value):
        return attends(query, key, value, query.shape[-1] ** -0.5 if scaling is None else float(scaling)), None
    torch_attention: Callable[..., tuple[torch.Tensor, None]] = sdpa_attention_forward
    return torch_attention(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
    )


AttentionInterface.register(_NAME, _tower_attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
