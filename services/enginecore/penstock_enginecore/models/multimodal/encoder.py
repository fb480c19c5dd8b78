"""The ``MediaEncoder`` of all families: a queue of items, the first of which is computed block by block."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock_common.types.media import EMBEDS, Modality
from penstock_enginecore.core.model_info import MediaInfo
from penstock_enginecore.models.multimodal.base import EncodedItem, EncoderItem
from penstock_enginecore.models.multimodal.families.base import Family
from penstock_enginecore.models.multimodal.quick_gelu import use_quick_gelu
from penstock_enginecore.models.multimodal.slices import SlicedRun, hook_blocks
from penstock_enginecore.models.multimodal.tensors import FLOATS, ItemError, Spec, read_tensors, to_data

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
