"""The worker's memory of pooling requests: prompts that only ever grow in how much of them is computed."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock_common.types.pooling import PoolingParams
from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.core.scheduler.output import NewRequestData, SchedulerOutput
from penstock_enginecore.pooling.accumulate import Accumulator


@dataclass(slots=True)
class PoolRequest:
    """A prompt between its first step and its last. ``token_types``: 1 from the second text of a pair on."""

    key: str
    params: PoolingParams
    token_ids: IntArray
    token_types: IntArray
    block_ids: list[list[int]]
    num_computed: int
    gathered: Accumulator | None = None

    @classmethod
    def of(cls, new: NewRequestData) -> "PoolRequest":
        """The worker's view of a new request. ValueError for one that generates."""
        if new.pooling_params is None:
            raise ValueError(f"request {new.request_id!r} has no pooling_params: this engine does not generate")
        token_types = np.zeros(len(new.token_ids), dtype=np.int64)
        if new.second_text_start is not None:
            token_types[new.second_text_start :] = 1
        return cls(
            key=new.request_id,
            params=new.pooling_params,
            token_ids=np.array(new.token_ids, dtype=np.int64),
            token_types=token_types,
            block_ids=[list(ids) for ids in new.block_ids],
            num_computed=new.num_computed_tokens,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``end`` of a prompt, to be computed in this step."""

    request: PoolRequest
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends here."""
        return self.end == len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class PoolInputs:
    """A step laid out flat, prompts one after the other: int64 ``[tokens]``; ``query_start_loc`` ``[requests + 1]``."""

    chunks: list[Chunk]
    token_ids: IntArray
    positions: IntArray
    token_types: IntArray
    query_start_loc: IntArray


class PoolBatch:
    """The requests by key."""

    def __init__(self) -> None:
        self._requests: dict[str, PoolRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def update(self, step: SchedulerOutput) -> None:
        """Apply what the scheduler says has changed: requests gone, requests new, blocks added."""
        for key in (*step.finished_request_ids, *step.preempted_request_ids):
            self._requests.pop(key, None)  # one that never ran here is none of our business
        for new in step.new_requests:
            self._requests[new.request_id] = PoolRequest.of(new)
        cached = step.cached_requests
        for key, num_computed, blocks in zip(
            cached.request_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            request = self._requests[key]
            request.num_computed = num_computed
            for known, added in zip(request.block_ids, blocks or ([] for _ in request.block_ids), strict=True):
                known.extend(added)

    def prepare(self, num_scheduled_tokens: dict[str, int]) -> PoolInputs:
        """Lay out the tokens to compute, in the order of ``num_scheduled_tokens``."""
        chunks = []
        for key, count in num_scheduled_tokens.items():
            request = self._requests[key]
            chunks.append(Chunk(request, request.num_computed, request.num_computed + count))
        return PoolInputs(
            chunks=chunks,
            token_ids=np.concatenate([c.request.token_ids[c.start : c.end] for c in chunks]),
            positions=np.concatenate([np.arange(c.start, c.end) for c in chunks]),
            token_types=np.concatenate([c.request.token_types[c.start : c.end] for c in chunks]),
            query_start_loc=np.cumsum([0, *(c.end - c.start for c in chunks)]),
        )


def attention_metadata(inputs: PoolInputs, group: int, block_size: int) -> AttentionMetadata:
    """Where the step's tokens stand in the paged cache of one group."""
    chunks = inputs.chunks
    tables = [c.request.block_ids[group] for c in chunks]
    block_table: npt.NDArray[np.int32] = np.zeros((len(chunks), max(map(len, tables))), dtype=np.int32)
    slots = []
    for row, (chunk, table) in enumerate(zip(chunks, tables, strict=True)):
        block_table[row, : len(table)] = table
        positions = np.arange(chunk.start, chunk.end)
        slots.append(block_table[row, positions // block_size].astype(np.int64) * block_size + positions % block_size)
    return AttentionMetadata(
        query_start_loc=inputs.query_start_loc,
        seq_lens=np.array([chunk.end for chunk in chunks], dtype=np.int64),
        block_table=block_table,
        slot_mapping=np.concatenate(slots),
        block_size=block_size,
    )
