"""The worker's memory of pooling requests: prompts that only ever grow in how much of them is computed."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock_common.types.pooling import PoolingParams
from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.core.scheduler.output import NewRequestData, SchedulerOutput
from penstock_enginecore.executor.generation.vector_positions import vector_positions
from penstock_enginecore.forward.backbone import BackboneBatch
from penstock_enginecore.lora.adapter_batching import ordered_by_adapter, segments_of
from penstock_enginecore.pooling.accumulate import Accumulator


@dataclass(slots=True)
class PoolingRequest:
    """A prompt between its first step and its last. ``token_types``: 1 from the second text of a pair on.
    ``digest``: of its adapter, empty without one.
    """

    key: str
    params: PoolingParams
    token_ids: IntArray
    token_types: IntArray
    block_ids: list[list[int]]
    num_computed: int
    digest: bytes = b""
    gathered: Accumulator | None = None

    @classmethod
    def of(cls, new: NewRequestData) -> "PoolingRequest":
        """The worker's view of a new request. ValueError for one that generates."""
        if new.pooling_params is None:
            raise ValueError(f"request {new.request_id!r} has no pooling_params: this engine does not generate")
        token_types = np.zeros(len(new.token_ids), dtype=np.int64)
        if new.second_text_start is not None:
            token_types[new.second_text_start :] = 1
        token_ids = np.array(new.token_ids, dtype=np.int64)
        if (vectors := vector_positions(new)) is not None:
            token_ids[vectors] = 0
        return cls(
            key=new.request_id,
            params=new.pooling_params,
            token_ids=token_ids,
            token_types=token_types,
            block_ids=[list(ids) for ids in new.block_ids],
            num_computed=new.num_computed_tokens,
            digest=b"" if new.lora is None else new.lora.digest,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``end`` of a prompt, to be computed in this step."""

    request: PoolingRequest
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends here."""
        return self.end == len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class PoolingInputs:
    """A step: parts of prompts, laid out flat in ``batch`` in their order."""

    chunks: list[Chunk]
    batch: BackboneBatch


class PoolingBatch:
    """The requests by key. ``num_groups``: KV cache groups, none of an encoder; ``block_size`` in tokens."""

    def __init__(self, num_groups: int, block_size: int) -> None:
        self._num_groups = num_groups
        self._block_size = block_size
        self._requests: dict[str, PoolingRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def update(self, step: SchedulerOutput) -> None:
        """Apply what the scheduler says has changed: requests gone, requests new, blocks added."""
        for key in (*step.finished_request_ids, *step.preempted_request_ids):
            self._requests.pop(key, None)  # one that never ran here is none of our business
        for new in step.new_requests:
            self._requests[new.request_id] = PoolingRequest.of(new)
        cached = step.cached_requests
        for key, num_computed, blocks in zip(
            cached.request_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            request = self._requests[key]
            request.num_computed = num_computed
            for known, added in zip(request.block_ids, blocks or ([] for _ in request.block_ids), strict=True):
                known.extend(added)

    def prepare(self, num_scheduled_tokens: dict[str, int]) -> PoolingInputs:
        """Lay out the tokens to compute, in the order of ``num_scheduled_tokens``; where some have adapters, by adapter."""
        digests = {key: self._requests[key].digest for key in num_scheduled_tokens}
        chunks = []
        for key in ordered_by_adapter(num_scheduled_tokens, digests):
            request = self._requests[key]
            chunks.append(Chunk(request, request.num_computed, request.num_computed + num_scheduled_tokens[key]))
        query_start_loc = np.cumsum([0, *(c.end - c.start for c in chunks)])
        batch = BackboneBatch(
            token_ids=np.concatenate([c.request.token_ids[c.start : c.end] for c in chunks]),
            positions=np.concatenate([np.arange(c.start, c.end) for c in chunks]),
            token_types=np.concatenate([c.request.token_types[c.start : c.end] for c in chunks]),
            query_start_loc=query_start_loc,
            attention=[_metadata(chunks, query_start_loc, g, self._block_size) for g in range(self._num_groups)],
            segments=segments_of([c.request.key for c in chunks], digests, query_start_loc),
        )
        return PoolingInputs(chunks, batch)


def _metadata(chunks: list[Chunk], query_start_loc: IntArray, group: int, block_size: int) -> AttentionMetadata:
    """Where the step's tokens stand in the paged cache of one group."""
    tables = [c.request.block_ids[group] for c in chunks]
    block_table: npt.NDArray[np.int32] = np.zeros((len(chunks), max(map(len, tables))), dtype=np.int32)
    slots = []
    for row, (chunk, table) in enumerate(zip(chunks, tables, strict=True)):
        block_table[row, : len(table)] = table
        positions = np.arange(chunk.start, chunk.end)
        slots.append(block_table[row, positions // block_size].astype(np.int64) * block_size + positions % block_size)
    return AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=np.array([chunk.end for chunk in chunks], dtype=np.int64),
        block_table=block_table,
        slot_mapping=np.concatenate(slots),
        block_size=block_size,
    )
