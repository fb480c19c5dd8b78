"""Steps of no meaning, which leave nothing behind."""

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.forward.base import Choice, ForwardBatch
from penstock_enginecore.lora.adapter import BLANK, LoraSegment
from penstock_enginecore.sample.base import DrawSettings, PlainDraws


def blank_decodes(
    size: int, num_groups: int, block_size: int, newest: torch.Tensor, *, adapted: bool = False
) -> tuple[ForwardBatch, IntArray]:
    """A token for each of ``size`` requests, which see the null block, write nowhere, and whose next tokens go to the last of
    ``newest``; and the rows that get logits. ``adapted``: the step launches what steps with adapters do, and has none.
    """
    none: IntArray = np.zeros(size, dtype=np.int64)
    draws = PlainDraws.of(DrawSettings.off(size), none.astype(np.uint64), none)
    choice = Choice(draws, newest, np.full(size, len(newest) - 1))
    starts: IntArray = np.arange(size + 1)
    table = np.zeros((size, 1), dtype=np.int32)
    metadata = AttentionMetadata(starts, none + 1, table, none - 1, block_size)
    segments = [LoraSegment(BLANK, 0, size)] if adapted else []
    return ForwardBatch(none, none, [metadata] * num_groups, choice=choice, segments=segments), starts[:-1]
