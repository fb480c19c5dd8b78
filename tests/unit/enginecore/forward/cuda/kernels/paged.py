"""Steps of the backends' tests, with their cache in the kernels' layout: unwritten slots are NaN, also in the null
block.
"""

from dataclasses import dataclass

import torch

from penstock_enginecore.attention.base import AttentionParams, StepPlan
from penstock_enginecore.attention.kv_cache import UNSCALED, KVScales
from penstock_enginecore.attention.reference import ReferenceAttention
from penstock_enginecore.forward.cuda.kernel_api import GroupInputs
from tests.fakes.models.interpreted_kernels import interpreted
from tests.unit.enginecore.attention.test_backends import CPU, Step

attention = interpreted("attention")


@dataclass
class Paged:
    """``keys`` and ``values`` lie in an arena of two layers, the other of which is NaN."""

    step: Step
    keys: torch.Tensor
    values: torch.Tensor
    group: GroupInputs

    @classmethod
    def of(cls, step: Step, requests: int = 0, blocks: int = 0, spare: int = 0) -> "Paged":
        """Build the inputs, padded to ``requests`` rows and ``blocks`` columns of the block table. Padding names the
        unused block ``spare``.
        """
        metadata = step.metadata
        count, width = metadata.block_table.shape
        table = torch.full((max(requests, count), max(blocks, width)), spare, dtype=torch.int32)
        for i, length in enumerate(metadata.seq_lens):
            used = -(-int(length) // metadata.block_size)
            table[i, :used] = torch.from_numpy(metadata.block_table[i, :used])
        starts = torch.full((len(table) + 1,), int(metadata.query_start_loc[-1]), dtype=torch.int32)
        starts[: count + 1] = torch.from_numpy(metadata.query_start_loc)
        lengths = torch.zeros(len(table), dtype=torch.int32)
        lengths[:count] = torch.from_numpy(metadata.seq_lens)
        ends = None if metadata.key_ends is None else torch.from_numpy(metadata.key_ends).int()
        slots = torch.from_numpy(metadata.slot_mapping)
        group = GroupInputs(table, starts, lengths, slots, ends, decodes_only=metadata.decodes_only)
        return cls(step, cls._pages(step, step.cache.keys), cls._pages(step, step.cache.values), group)

    @staticmethod
    def _pages(step: Step, slots: torch.Tensor) -> torch.Tensor:
        heads, block_size = step.cache.num_kv_heads, step.metadata.block_size
        pages = slots.unflatten(0, (-1, block_size)).unflatten(2, (heads, -1)).transpose(1, 2)
        arena = torch.full((len(pages), 2, *pages.shape[1:]), torch.nan, dtype=slots.dtype)
        arena[1:, 1] = pages[1:]
        return arena[:, 1]

    def attend(
        self,
        params: AttentionParams,
        tokens: int = 0,
        scales: KVScales = UNSCALED,
        *,
        invariant: bool = False,
        capacity: int = 0,
    ) -> torch.Tensor:
        """Compute attention with output and scratch memory that hold NaN before. The step is padded to ``tokens``. The
        scratch memory has ``capacity`` rows, by default one for each token.
        """
        query = self.step.query
        padding = query.new_full((max(tokens - len(query), 0), *query.shape[1:]), torch.nan)
        query = torch.cat([query, padding])
        out = query.new_full((*query.shape[:2], self.values.shape[3]), torch.nan)
        pieces = attention.pieces_per_request(self.keys.shape[1])
        capacity = capacity or max(len(query), len(self.group.seq_lens))
        scratch = attention.Scratch.allocate(capacity, pieces, *out.shape[1:], CPU)
        for tensor in (scratch.sums, scratch.largest, scratch.total):
            tensor.fill_(torch.nan)
        attention.attend(query, self.keys, self.values, out, self.group, params, scratch, scales, invariant=invariant)
        return out


def expected(step: Step, params: AttentionParams) -> torch.Tensor:
    """Return the result of the reference."""
    return ReferenceAttention().attend(
        step.query, step.key, step.value, step.cache, StepPlan(step.metadata, CPU), params
    )
