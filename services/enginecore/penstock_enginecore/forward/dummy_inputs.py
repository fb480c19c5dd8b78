"""Prompts and steps with arbitrary tokens, which the engine uses to compare forward passes and to warm them up."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.base import (
    NO_DEMANDS,
    Choice,
    ForwardBatch,
    ForwardPass,
    MediaDemands,
    StatefulForward,
    state_memory,
)
from penstock_enginecore.lora.adapter import BLANK, LoraSegment
from penstock_enginecore.sample.base import DrawSettings, PlainDraws
from penstock_enginecore.states.base import StateMetadata
from penstock_enginecore.states.core.spec import SLOTS_PER_REQUEST, SPAN, StatePoolConfig

Stateful = Any
"""A forward pass of a generative model, or the layers of a pooling model. Both kinds of objects have a KV cache and may
have recurrent states.
"""
NUM_TOKENS = 24
CUTS = (13, 14, 22, 23)
"""Positions at which a prompt is cut into parts of 13, 1, 8, 1 and 1 tokens."""
_SPAN = slice(4, 11)
"""Positions of the image in a multimodal prompt. All are inside the prompt's first part."""
_SPAN_WIDTH = 3
_BLOCK_SIZE = 16
"""Number of tokens per KV cache block. The number is a multiple of the tile size in the layout of every attention
backend.
"""


def block_size_of(specs: Mapping[str, KVCacheSpec]) -> int:
    """Return the number of tokens per KV cache block. For a model without attention layers, return the number of tokens
    between two recurrent states.
    """
    return next((spec.block_size for spec in specs.values()), SPAN)


@dataclass(frozen=True, slots=True)
class Probe:
    """Prompt that forward passes compute, so that their results can be compared.

    Attributes:
        token_ids: int64 ``[tokens]``.
        positions: int64 ``[tokens]``.
        metadata: Attention metadata for a KV cache of ``num_blocks`` blocks.
        num_blocks: Number of KV cache blocks, including the null block.
        demands: Kinds of media inputs in the first step of the prompt.
    """

    token_ids: IntArray
    positions: IntArray
    metadata: AttentionMetadata
    num_blocks: int
    demands: MediaDemands = NO_DEMANDS

    @classmethod
    def prompt(cls, vocab_size: int, demands: MediaDemands = NO_DEMANDS) -> "Probe":
        """Return a short prompt whose token ids are spread over the vocabulary. If ``demands`` has inputs, the prompt
        contains an image.
        """
        probe = cls._of(np.arange(1, NUM_TOKENS + 1) * 7919 % vocab_size, NUM_TOKENS, _BLOCK_SIZE)
        return replace(probe, demands=demands)

    @classmethod
    def prompts(cls, vocab_size: int, demands: MediaDemands) -> "list[Probe]":
        """Return the prompt without an image, and also the prompt with an image if ``demands`` has inputs."""
        return [cls.prompt(vocab_size), *([cls.prompt(vocab_size, demands)] if demands else [])]

    @classmethod
    def alone(cls, token_ids: IntArray) -> "Probe":
        """Return a prompt with ``token_ids``, int64 ``[tokens]``."""
        return cls._of(token_ids, len(token_ids), _BLOCK_SIZE)

    def batch(self, forward: ForwardPass, start: int, end: int) -> ForwardBatch:
        """Return a step that computes tokens ``start`` to ``end`` of the probe's only sequence."""
        of, part = self.metadata, slice(start, end)
        starts, lengths = np.array([0, end - start]), np.array([end])
        metadata = AttentionMetadata(starts, lengths, of.block_table, of.slot_mapping[part], of.block_size)
        batch = ForwardBatch(
            self.token_ids[part], self.positions[part], [metadata], states=alone_states(forward, metadata)
        )
        return self._with_media(batch, forward) if start == 0 else batch

    def _with_media(self, batch: ForwardBatch, forward: ForwardPass) -> ForwardBatch:
        """Return the batch with an image at the positions ``_SPAN``.

        If ``demands`` includes these inputs, the image's tokens have two-dimensional positions, attend to each other,
        get deepstack embeddings, and get embeddings that are not those of their ids. The elements of deepstack
        embeddings have a root mean square of 1.
        """
        demands = self.demands
        if demands.spans:
            ends = batch.positions + 1
            ends[_SPAN] = _SPAN.stop
            windowed = demands.windowed_spans
            attention = [replace(each, key_ends=ends, windowed_ends=windowed) for each in batch.attention]
            batch = replace(batch, attention=attention)
        if demands.sections:
            sections = np.stack([batch.positions] * 3)
            down, right = np.divmod(np.arange(_SPAN.stop - _SPAN.start), _SPAN_WIDTH)
            sections[:, _SPAN] = _SPAN.start + np.stack([0 * down, down, right])
            batch = replace(batch, rope_positions=sections)
        if demands.num_deepstack:
            embedded = forward.embed(batch.token_ids)
            rows = torch.zeros(demands.num_deepstack, *embedded.shape, dtype=embedded.dtype, device=embedded.device)
            of_span = torch.stack([embedded.roll(1 + layer, 0)[_SPAN] for layer in range(len(rows))]).float()
            rows[:, _SPAN] = torch.nn.functional.normalize(of_span, dim=2).mul(of_span.shape[2] ** 0.5).to(rows.dtype)
            batch = replace(batch, embedded=embedded, deepstack=rows)
        if demands.layer_ids:
            embedded = forward.embed(batch.token_ids) if batch.embedded is None else batch.embedded
            embedded[_SPAN] = embedded.roll(1, 0)[_SPAN]
            replaced = torch.arange(_SPAN.start, _SPAN.stop, device=embedded.device)
            batch = replace(batch, embedded=embedded, replaced=replaced)
        return batch

    @classmethod
    def largest(cls, num_tokens: int, max_len: int, block_size: int) -> "Probe":
        """Return a probe with ``num_tokens`` new tokens in as few sequences as possible, each of at most ``max_len``
        tokens.
        """
        return cls._of(np.zeros(num_tokens, dtype=np.int64), min(num_tokens, max_len), block_size)

    @classmethod
    def _of(cls, token_ids: IntArray, length: int, block_size: int) -> "Probe":
        """Return a probe with ``token_ids`` in sequences of ``length`` tokens. The last sequence may be shorter."""
        count = len(token_ids)
        starts = np.append(np.arange(0, count, length), count)
        sequence, positions = np.divmod(np.arange(count), length)
        blocks = -(-length // block_size)
        # Block 0 is the null block.
        table = np.arange(1, 1 + blocks * (len(starts) - 1), dtype=np.int32).reshape(-1, blocks)
        slots = table[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
        metadata = AttentionMetadata(starts, np.diff(starts), table, slots, block_size)
        return cls(token_ids, positions, metadata, 1 + table.size)


def probe_logits(forward: ForwardPass, probe: Probe, rows: IntArray | None = None) -> torch.Tensor:
    """Return logits ``[len(rows), vocab]`` for the tokens of ``probe`` with the indices ``rows``, or for all tokens if
    ``rows`` is None. Afterwards ``forward`` has no KV cache.
    """
    with throwaway(forward, probe.metadata.block_size, probe.num_blocks, probe.metadata.num_requests):
        states = alone_states(forward, probe.metadata)
        batch = ForwardBatch(probe.token_ids, probe.positions, [probe.metadata], states=states)
        if probe.demands:
            batch = probe.batch(forward, 0, len(probe.token_ids))
        return forward.run(batch, np.arange(len(probe.token_ids)) if rows is None else rows).logits


@contextmanager
def throwaway(forward: Stateful, block_size: int, num_blocks: int, num_requests: int) -> Iterator[None]:
    """Return a context in which ``forward`` has a temporary KV cache and temporary memory for states. After the
    context, ``forward`` has neither.

    The KV cache has ``num_blocks`` blocks of ``block_size`` tokens. The memory has space for the states of
    ``num_requests`` requests.
    """
    states = state_memory(forward)
    forward.bind(forward.memory.throwaway(block_size, num_blocks))
    if states is not None and isinstance(forward, StatefulForward):
        forward.bind_states(
            states.allocate(
                StatePoolConfig(
                    num_slots=1 + SLOTS_PER_REQUEST * num_requests,
                    num_requests=num_requests,
                    rows_per_request=SPAN,
                    interval=SPAN,
                )
            )
        )
    try:
        yield
    finally:
        forward.bind({})
        if isinstance(forward, StatefulForward):
            forward.bind_states({})


def alone_states(forward: Stateful, metadata: AttentionMetadata) -> StateMetadata | None:
    """Return the indices of recurrent states for a step that no scheduler made, or None for a model without recurrent
    layers.
    """
    if state_memory(forward) is None:
        return None
    return StateMetadata.alone(metadata.query_start_loc, metadata.seq_lens)


def probe_parts(forward: ForwardPass, probe: Probe, cuts: Sequence[int]) -> torch.Tensor:
    """Return logits of all tokens of the probe's one sequence, computed in several steps. Each step computes the tokens
    between two ``cuts``.

    Later steps read keys and values that earlier steps wrote to the KV cache. Afterwards ``forward`` has no KV cache.
    """
    logits = []
    with throwaway(forward, probe.metadata.block_size, probe.num_blocks, probe.metadata.num_requests):
        for start, end in itertools.pairwise([0, *cuts, len(probe.token_ids)]):
            batch = probe.batch(forward, start, end)
            logits.append(forward.run(batch, np.arange(end - start)).logits.clone())
    return torch.cat(logits)


def blank_step(
    num_tokens: int,
    num_requests: int,
    num_groups: int,
    block_size: int,
    newest: torch.Tensor,
    *,
    adapted: bool = False,
) -> tuple[ForwardBatch, IntArray]:
    """Return a step in which ``num_requests`` dummy requests compute ``num_tokens`` tokens together, and the indices of
    the rows that get logits, which are the last tokens of the requests.

    The requests attend to the null block, write no keys and values, and have no recurrent states. The tokens that the
    step samples are stored in the last entry of ``newest``. If ``adapted`` is true, the step launches the kernels for
    LoRA adapters, although no request uses an adapter.
    """
    none: IntArray = np.zeros(num_requests, dtype=np.int64)
    draws = PlainDraws.of(DrawSettings.off(num_requests), none.astype(np.uint64), none)
    choice = Choice(draws, newest, np.full(num_requests, len(newest) - 1))
    lengths = np.diff(np.arange(num_requests + 1) * num_tokens // num_requests)
    starts: IntArray = np.cumsum([0, *lengths])
    table = np.zeros((num_requests, -(-int(lengths.max()) // block_size)), dtype=np.int32)
    ids: IntArray = np.zeros(num_tokens, dtype=np.int64)
    metadata = AttentionMetadata(starts, lengths, table, ids - 1, block_size)
    segments = [LoraSegment(BLANK, 0, num_tokens)] if adapted else []
    blank = ForwardBatch(
        ids,
        metadata.positions(),
        [metadata] * num_groups,
        choice=choice,
        segments=segments,
        states=StateMetadata(()),
    )
    return blank, starts[1:] - 1
