"""What a step has of media, as the CPU kernels' decoder takes it."""

import torch

from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.native.attention import key_ends_of
from penstock_enginecore.native.ffi_structs import Step


def give_media(step: Step, batch: ForwardBatch, num_layers: int) -> torch.Tensor | None:
    """Have ``step``, that of ``batch``, point to ends of keys and to rows for the first layers of ``num_layers``. Returns the
    memory of these, which must outlive the step. ValueError for what the kernels would read beyond.
    """
    step.key_ends = key_ends_of(batch.attention[0])
    if batch.deepstack is None:
        return None
    rows = batch.deepstack.float().contiguous()
    embedded = None if batch.embedded is None else batch.embedded.shape
    if len(rows) > num_layers or rows.shape[1:] != embedded:
        raise ValueError(f"rows {list(rows.shape)} do not go behind the first of {num_layers} layers of {embedded}")
    step.num_deepstack, step.deepstack = len(rows), rows.data_ptr()
    return rows


def expect_no_media(batch: ForwardBatch) -> None:
    """Raises ValueError for a chain, whose later steps would be without."""
    if batch.rope_positions is not None or batch.deepstack is not None or batch.attention[0].key_ends is not None:
        raise ValueError("a chain has no media")
