"""The ``MediaEncoder`` of all families: a queue of items, the first of which is computed block by block."""

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

# A tower that is computed a few blocks at a time, between forward passes of the text model.


class SlicedRun:
    """One run of a tower, that stops behind each block until it is asked for more.

    The tower's own forward pass runs in a greenlet with contexts of its own, on the thread that calls, which must be the same
    each time. torch's modes belong to threads: each slice runs in inference mode.
    """

    def __init__(self, compute: Callable[[], torch.Tensor], num_blocks: int) -> None:
        self._greenlet = _BlockGreenlet(compute, num_blocks)

    @property
    def blocks_left(self) -> int:
        """Blocks that are still to be computed."""
        return self._greenlet.blocks_left

    @torch.inference_mode()
    def advance(self, num_blocks: int) -> torch.Tensor | None:
        """Compute up to ``num_blocks`` blocks, and what is in front of them and, with the last one, behind. The result if this
        was all, else None. Raises what the tower raises.
        """
        run = self._greenlet
        run.allowed = num_blocks
        run.parent = getcurrent()
        found: torch.Tensor | None = run.switch()
        return found if run.dead else None

    def stop(self) -> None:
        """Give up what is left."""
        self._greenlet.parent = getcurrent()
        self._greenlet.throw(GreenletExit)


class _BlockGreenlet(greenlet):  # type: ignore[misc]  # it has no types
    """``allowed``: blocks before it goes back to its parent."""

    def __init__(self, compute: Callable[[], torch.Tensor], num_blocks: int) -> None:
        super().__init__(compute)
        self.gr_context = copy_context()
        self.blocks_left = num_blocks
        self.allowed = 0

    def pass_block(self) -> None:
        """A block is done."""
        self.blocks_left -= 1
        self.allowed -= 1
        if self.allowed <= 0 and self.blocks_left > 0 and self.parent is not None:
            self.parent.switch(None)


def hook_blocks(blocks: Iterable[torch.nn.Module]) -> None:
    """Have ``blocks`` tell the run that they are computed in, if there is one."""
    for block in blocks:
        block.register_forward_hook(_passed)


def _passed(module: torch.nn.Module, inputs: object, output: object) -> None:  # noqa: ARG001 - torch's signature
    current = getcurrent()
    if isinstance(current, _BlockGreenlet):
        current.pass_block()


# Hendrycks' quick GELU, ``x * sigmoid(1.702 x)``, as CLIP's towers and Qwen2-VL's have it, in one buffer.


class QuickGELU(torch.nn.Module):
    """The numbers of transformers' module, bit for bit, which fills three buffers of the input's size: of a large image on a CPU
    the system's pages for those take seven times as long as the arithmetic.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of each number of ``x``, any shape."""
        return (x * 1.702).sigmoid_().mul_(x)


def use_quick_gelu(tower: torch.nn.Module) -> None:
    """Replace transformers' modules in ``tower``."""
    for parent in list(tower.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is QuickGELUActivation:
                setattr(parent, name, QuickGELU())


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Begun:
    """An item, a part of whose blocks may be done."""

    item: EncoderItem
    run: SlicedRun

    @property
    def block_cost(self) -> int:
        """Of each block."""
        return max(self.item.num_embeds, 1)


class TowerEncoder:
    """The towers of ``family``, in slices. Items are computed one at a time, each as if it were alone: in a batch they might come
    out with other bits, since libraries choose how to multiply by the sizes.
    """

    def __init__(self, family: Family, device: torch.device, dtype: torch.dtype) -> None:
        self._family = family
        self._device = device
        self._dtype = dtype
        self._waiting: dict[str, EncoderItem] = {}
        self._begun: _Begun | None = None
        self.media: Sequence[MediaInfo] = [intake.info(len(family.blocks)) for intake in family.by_modality.values()]
        self.width = family.width * (1 + family.num_deepstack)
        self.num_deepstack = family.num_deepstack
        self.rope_positions = family.rope_index
        self.modules: Sequence[torch.nn.Module] = (family.towers,)
        use_quick_gelu(family.towers)
        hook_blocks(family.blocks)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def start(self, item: EncoderItem) -> None:
        """Put an item behind those that are to be encoded, once."""
        self._waiting.setdefault(item.identifier, item)

    def drop(self, identifier: str) -> None:
        """Forget an item."""
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
                raise  # what is wrong with a device is no item's fault
            except ItemError as e:
                done.append(self._fail(item, str(e)))
            except Exception as e:
                logger.warning("a tower failed at an item of %d embeddings", item.num_embeds, exc_info=True)
                done.append(self._fail(item, f"the model's tower failed: {type(e).__name__}: {_first_line(e)}"))
        return done

    def largest(self, modality: Modality) -> EncoderItem:
        """An item as large as the model takes."""
        intake = self._family.by_modality[modality]
        tensors = intake.largest_tensors()
        data = {name: to_data(tensor) for name, tensor in tensors.items()}
        return EncoderItem(f"largest {modality}", modality, intake.count(tensors), data)

    def _begin(self, item: EncoderItem) -> _Begun:
        if self._begun is None:
            intake = self._family.by_modality.get(item.modality)
            if intake is None:
                raise ItemError(f"the model takes {' and '.join(self._family.by_modality)}, and no {item.modality}")
            tensors = read_tensors(item.data, intake.specs)
            if (rows := intake.count(tensors)) != item.num_embeds:
                raise ItemError(f"its tensors make {rows} embeddings, and the prompt has room for {item.num_embeds}")
            tensors = {name: tensor.to(self._device) for name, tensor in tensors.items()}
            run = SlicedRun(lambda: intake.encode(tensors), len(self._family.blocks))
            self._begun = _Begun(item, run)
        return self._begun

    def _given(self, item: EncoderItem) -> torch.Tensor:
        """Rows that came in the place of what they are computed from."""
        spec = Spec(FLOATS, (item.num_embeds, self.width))
        return read_tensors(item.data, {EMBEDS: spec})[EMBEDS].to(self._device, self._dtype)

    def _checked(self, item: EncoderItem, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape != (item.num_embeds, self.width):
            raise ItemError(f"the model's tower gave {list(rows.shape)}, and not {[item.num_embeds, self.width]}")
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


# The attention function of towers, in place of torch's where somebody else is to attend.

_NAME = "penstock_towers"


class Attends(Protocol):
    """Attention of whole sequences in which every token sees every other."""

    def takes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether it attends over ``[sequences, heads, tokens, head size]`` of these."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        """``[sequences, tokens, heads, value size]``."""


_attending: WeakKeyDictionary[torch.nn.Module, Attends] = WeakKeyDictionary()


def attend_by(tower: torch.nn.Module, attends: Attends) -> None:
    """Let ``attends`` do what it takes of the attention of a ``tower``, which is torch's."""
    for module in tower.modules():
        config: Any = getattr(module, "config", None)
        # A configuration of several sections is that of the text model, too.
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
    """The signature of transformers' ``AttentionInterface``."""
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
