"""Prompts of no meaning, in a cache of their own, to see what a forward pass makes of them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.forward.base import ForwardBatch, ForwardPass

NUM_TOKENS = 24
CUTS = (13, 14, 22, 23)
"""Where a prompt is cut so that its parts are a prompt, a token, a piece of a prompt, and two tokens one by one."""
_BLOCK_SIZE = 16
"""Of every backend's layout some whole tiles."""


@dataclass(frozen=True, slots=True)
class Probe:
    """``token_ids`` and ``positions`` int64 ``[tokens]``; ``metadata`` in a cache of ``num_blocks`` blocks, the null block
    included.
    """

    token_ids: IntArray
    positions: IntArray
    metadata: AttentionMetadata
    num_blocks: int

    @classmethod
    def prompt(cls, vocab_size: int) -> "Probe":
        """A prompt of a few tokens from all over the vocabulary."""
        return cls._of(np.arange(1, NUM_TOKENS + 1) * 7919 % vocab_size, NUM_TOKENS, _BLOCK_SIZE)

    @classmethod
    def largest(cls, num_tokens: int, max_len: int, block_size: int) -> "Probe":
        """``num_tokens`` new tokens of sequences as long as may be, ``max_len`` tokens at most."""
        return cls._of(np.zeros(num_tokens, dtype=np.int64), min(num_tokens, max_len), block_size)

    @classmethod
    def _of(cls, token_ids: IntArray, length: int, block_size: int) -> "Probe":
        """``token_ids`` in sequences of ``length``, the last of which may be shorter."""
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
    """Logits ``[len(rows), vocab]`` at ``rows`` of ``probe``, of all tokens for None. Leaves ``forward`` without a KV cache."""
    forward.bind(forward.memory.throwaway(probe.metadata.block_size, probe.num_blocks))
    try:
        batch = ForwardBatch(probe.token_ids, probe.positions, [probe.metadata])
        return forward.run(batch, np.arange(len(probe.token_ids)) if rows is None else rows).logits
    finally:
        forward.bind({})


def probe_parts(forward: ForwardPass, probe: Probe, cuts: Sequence[int]) -> torch.Tensor:
    """As ``probe_logits``, of all tokens of the one sequence of ``probe``, in a step for each part between ``cuts``: later parts
    read from the cache what earlier ones have written.
    """
    of = probe.metadata
    forward.bind(forward.memory.throwaway(of.block_size, probe.num_blocks))
    logits = []
    try:
        for start, end in itertools.pairwise([0, *cuts, len(probe.token_ids)]):
            part = slice(start, end)
            starts, lengths = np.array([0, end - start]), np.array([end])
            metadata = AttentionMetadata(starts, lengths, of.block_table, of.slot_mapping[part], of.block_size)
            batch = ForwardBatch(probe.token_ids[part], probe.positions[part], [metadata])
            logits.append(forward.run(batch, np.arange(end - start)).logits.clone())
    finally:
        forward.bind({})
    return torch.cat(logits)
