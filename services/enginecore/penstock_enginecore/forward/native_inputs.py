"""The inputs of a step as the CPU kernels' decoder takes them: embeddings, positions, media, and the tokens it chose itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.forward.base import ChainedDraws, ForwardBatch
from penstock_enginecore.models.decoder_plan import embedding_scale
from penstock_enginecore.models.dtypes import NarrowWeight
from penstock_enginecore.native.attention import key_ends_of
from penstock_enginecore.native.ffi_structs import Chain, Rotary, Step
from penstock_enginecore.native.weights import KINDS

Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines float32 ``[positions, size]``."""
_MAX_TABLE_BYTES = 64 * 1024 * 1024
"""Cosines and sines of all positions are kept up to this size."""


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Where the kernels find rows ``[vocab, hidden]`` of an embedding, numbers of ``kind``, while this is there; they multiply
    them with ``scale``.
    """

    weight: torch.Tensor
    kind: int
    scale: float = 1.0


class EmbeddingLookup:
    """Rows of ``embedding``, a model's own module."""

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding
        self._scale = embedding_scale(embedding)
        known = self._scale is not None and embedding.max_norm is None
        self._is_known = known and not embedding._forward_pre_hooks and not embedding._forward_hooks

    def rows(self, token_ids: IntArray) -> EmbeddingRows | None:
        """For the kernels to look ``token_ids`` up; None where the module does more than that. Raises IndexError."""
        weight = self._embedding.weight
        scales_floats = weight.dtype == torch.float32
        scaled = type(self._embedding) is not torch.nn.Embedding
        weight = weight.kept if isinstance(weight, NarrowWeight) else weight
        if self._scale is None or not self._is_known or (scaled and not scales_floats):
            return None
        if weight.dtype not in (torch.float32, torch.bfloat16) or not weight.is_contiguous():
            return None
        _check(token_ids, len(weight), "a token id")
        return EmbeddingRows(weight, KINDS[weight.dtype], self._scale)

    def of(self, token_ids: IntArray) -> torch.Tensor:
        """float32 ``[tokens, hidden]``, by the module."""
        return cast("torch.Tensor", self._embedding(torch.from_numpy(token_ids))).float()


@dataclass(frozen=True, slots=True)
class StepRotaries:
    """``structs`` point into ``turns``; int64 ``positions`` ``[tokens]`` are the rows of a step's tokens in all of them."""

    structs: Any
    positions: IntArray
    turns: Sequence[Turns]

    @classmethod
    def of(cls, turns: Sequence[Turns], positions: IntArray) -> "StepRotaries":
        """With structs for ``turns``."""
        structs = (Rotary * len(turns))(*(Rotary(cosines.data_ptr(), sines.data_ptr()) for cosines, sines in turns))
        return cls(structs, positions, turns)


class Rotaries:
    """A model's rotary embeddings. ``makers``: what make those of int64 positions, beside a tensor like the states. ``size``:
    numbers of a head that they turn; ``max_len``: positions that the model allows.
    """

    def __init__(
        self, makers: Sequence[Callable[[torch.Tensor, torch.Tensor], Turns]], size: int, max_len: int
    ) -> None:
        self._makers = makers
        self._kept: StepRotaries | None = None
        if 8 * size * max_len * len(makers) <= _MAX_TABLE_BYTES:
            self._kept = StepRotaries.of(self._make(torch.arange(max_len), torch.empty(0)), np.arange(max_len))

    def of(self, positions: IntArray, like: torch.Tensor) -> StepRotaries:
        """At ``positions`` ``[tokens]``. Raises IndexError."""
        if self._kept is None:
            return StepRotaries.of(self._make(torch.from_numpy(positions), like), np.arange(len(positions)))
        _check(positions, len(self._kept.positions), "a position")
        return StepRotaries(self._kept.structs, positions, self._kept.turns)

    def of_step(self, batch: ForwardBatch, like: torch.Tensor) -> StepRotaries:
        """At the positions of the tokens of ``batch``. Raises IndexError."""
        if batch.rope_positions is None:
            return self.of(batch.positions, like)
        return self.of_sections(batch.rope_positions, like)

    def of_sections(self, positions: IntArray, like: torch.Tensor) -> StepRotaries:
        """At ``positions`` ``[3, tokens]`` of sections; those of tokens that stand at one position in all of them are kept."""
        same = positions[0]
        if self._kept is not None and (positions == same).all() and same.max(initial=0) < len(self._kept.positions):
            return self.of(same, like)
        return StepRotaries.of(self._make(torch.from_numpy(positions), like), np.arange(len(same)))

    def _make(self, positions: torch.Tensor, like: torch.Tensor) -> list[Turns]:
        return [make(positions, like) for make in self._makers]


def later_positions(batch: ForwardBatch, rows: IntArray, counts: IntArray) -> IntArray:
    """Positions of the tokens that come behind ``rows`` ``[requests]``, the last ones of the first requests of ``batch``, where
    ``counts`` ``[requests]`` are chosen, the most first: int64 ``[counts[0] - 1, requests]``, the last one again where a request
    has no more. Raises IndexError where a block table ends before one, ValueError for other counts.
    """
    if (
        not len(counts)
        or counts[-1] < 1
        or (counts[1:] > counts[:-1]).any()
        or len(counts) > len(batch.attention[0].seq_lens)
    ):
        raise ValueError(f"requests of which there are {len(counts)} want {counts.tolist()} tokens")
    last = batch.positions[rows]
    end = int((last + counts).max())
    for metadata in batch.attention:
        if end > metadata.block_table.shape[1] * metadata.block_size:
            raise IndexError(f"the table of {metadata.block_table.shape[1]} blocks ends before position {end - 1}")
    later: IntArray = last + np.minimum(np.arange(1, counts[0])[:, None], counts - 1)
    return later


def _check(indices: IntArray, end: int, what: str) -> None:
    """The kernels read where they are told."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < end:
        raise IndexError(f"{what} is {indices.min()} or {indices.max()}, which is not from 0 to {end - 1}")


class ChainedTokens:
    """``tokens`` int64 ``[counts[0], requests]``, 0 until the kernels have put them there, behind ``rows`` ``[requests]`` of a
    step. ``positions``: of the step's tokens and, behind them, of those that come later.
    """

    def __init__(self, batch: ForwardBatch, draws: ChainedDraws) -> None:
        """Raises as ``later_positions``."""
        self._batch, self._draws = batch, draws
        self._counts = np.ascontiguousarray(draws.counts)
        self._uniforms = np.ascontiguousarray(draws.uniforms)
        self.rows = batch.attention[0].query_start_loc[1 : len(self._counts) + 1] - 1
        later = later_positions(batch, self.rows, self._counts)
        self.positions = np.concatenate([batch.positions, later.ravel()])
        self.tokens: IntArray = np.zeros((len(later) + 1, len(self._counts)), dtype=np.int64)

    def struct(self, rotaries: StepRotaries, width: int, vocabulary: IntArray | None = None) -> Chain:
        """``rotaries``: at ``positions``. ``width``: logits to choose from, which are of these tokens of the ``vocabulary``, None
        for those in order. It points into what it is made of.
        """
        return Chain(
            len(self.tokens),
            len(self._batch.attention),
            width,
            self._counts.ctypes.data,
            rotaries.positions.ctypes.data + self._batch.positions.nbytes,
            self._draws.temperature.ctypes.data,
            self._uniforms.ctypes.data,
            self.tokens.ctypes.data,
            None if vocabulary is None else vocabulary.ctypes.data,
        )


def expect_embeddings(embedding: EmbeddingRows | None, vocab_size: int) -> EmbeddingRows:
    """Raises IndexError for tokens that may be chosen and that the kernels cannot look up."""
    if embedding is None or vocab_size > len(embedding.weight):
        raise IndexError(f"there are no embeddings of {vocab_size} tokens that the kernels could look up")
    return embedding


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
