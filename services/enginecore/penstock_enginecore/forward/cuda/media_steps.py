"""Inputs of the fused decoder for steps with images, video or sound.

Steps with such inputs are launched kernel by kernel. A decode of a request with media has three equal rotary positions,
so it is an ordinary step with other positions, which a graph can contain.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.forward.base import ForwardBatch, MediaDemands, to_device
from penstock_enginecore.forward.cuda.buffers import StepInputs
from penstock_enginecore.forward.cuda.kernel_api import GroupInputs, MediaInputs, RotaryTable
from penstock_enginecore.models.decoder_plan import LatentPlan, ModelPlan


def unsupported(plan: ModelPlan, demands: MediaDemands) -> str:
    """Return the media inputs of the model that the fused decoder does not support, as text, or an empty text."""
    if demands.layer_ids:
        return str(MediaDemands(layer_ids=True))
    if demands.spans and any(isinstance(layer.attention, LatentPlan) for layer in plan.layers):
        return f"{MediaDemands(spans=True)} and latent attention"
    if demands.num_deepstack and any(layer.norms_after[1] is not None for layer in plan.layers):
        return f"{MediaDemands(num_deepstack=1)} and norms after its MLPs"
    return ""


def with_rotary_positions(batch: ForwardBatch, max_len: int) -> ForwardBatch:
    """Return the batch with rotary positions in place of positions, if the three rotary positions of each token are
    equal and less than ``max_len``. Otherwise return the batch.
    """
    rope = batch.rope_positions
    if rope is None or not (rope == rope[0]).all() or rope[0].max(initial=0) >= max_len:
        return batch
    return replace(batch, positions=rope[0], rope_positions=None)


def with_media(batch: ForwardBatch, inputs: StepInputs, plan: ModelPlan) -> StepInputs:
    """Return ``inputs``, the padded inputs of the step, with the media inputs of ``batch``. Returns ``inputs`` itself
    if the step has none.
    """
    has_ends = any(metadata.key_ends is not None for metadata in batch.attention)
    if batch.rope_positions is None and batch.deepstack is None and not has_ends:
        return inputs
    tables = None
    if batch.rope_positions is not None:
        tables = _tables(batch.rope_positions, plan, inputs.positions)
        rows = torch.arange(len(inputs.positions), dtype=torch.int32, device=inputs.positions.device)
        inputs = replace(inputs, positions=rows)
    groups = tuple(map(_with_ends, inputs.groups, batch.attention))
    return replace(inputs, groups=groups, media=MediaInputs(tables, batch.deepstack))


def _tables(rope: IntArray, plan: ModelPlan, like: torch.Tensor) -> Sequence[RotaryTable]:
    """Return the rotary tables of each variant, with one row for each token of the step, including padding."""
    padded = np.zeros((3, len(like)), dtype=np.int64)
    padded[:, : rope.shape[1]] = rope
    positions, dtype = to_device(padded, like.device), torch.empty(0, dtype=torch.float32, device=like.device)
    tables = []
    for variant in plan.rotary_variants:
        halves = [part[:, : part.shape[1] // 2].contiguous() for part in plan.turns(variant, positions, dtype)]
        tables.append(RotaryTable(*halves))
    return tables


def _with_ends(group: GroupInputs, metadata: AttentionMetadata) -> GroupInputs:
    """Return the group with the ends of the keys of each token, padded with zeros."""
    if metadata.key_ends is None:
        return group
    padded = np.zeros(len(group.slots), dtype=np.int32)
    padded[: len(metadata.key_ends)] = metadata.key_ends
    ends = to_device(padded, group.slots.device)
    return replace(group, key_ends=ends, windowed_ends=metadata.windowed_ends)
