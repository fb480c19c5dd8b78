"""Inputs of a step for the decoder of the CPU kernels: embeddings, positions, media and sampling parameters of chained
steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.forward.base import ChainedDraws, ForwardBatch
from penstock_enginecore.models.decoder_plan import LayerInputsPlan
from penstock_enginecore.models.dtypes import NarrowWeight
from penstock_enginecore.models.plan_reader import embedding_scale
from penstock_enginecore.native.attention import key_ends_of
from penstock_enginecore.native.ffi_structs import Chain, LayerRows, Rotary, Step
from penstock_enginecore.native.linear import PackedEmbedding
from penstock_enginecore.native.weights import KINDS, PACKED_ROWS, PackedWeight

Turns = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Cosines and sines of rotary positions, both float32 ``[positions, size]``, and the factors of queries by position,
float32 ``[positions]``, or None.
"""
_MAX_TABLE_BYTES = 64 * 1024 * 1024
"""Maximum size in bytes of precomputed cosines and sines of all positions. If the tables would be larger, each step
computes the cosines and sines of its positions.
"""


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Embedding table ``[vocab, hidden]`` in which the kernels look up tokens.

    Attributes:
        table: The table. This object keeps the memory of the table alive.
        count: Number of rows of the table.
        kind: Number that stands for the table's format in the kernels' interface.
        scale: Factor that the kernels apply to the rows.
    """

    table: torch.Tensor | PackedWeight
    count: int
    kind: int
    scale: float = 1.0

    @property
    def pointer(self) -> int:
        """Address that the kernels need: that of the first element, or of the struct of a packed weight."""
        return self.table.pointer if isinstance(self.table, PackedWeight) else self.table.data_ptr()


class EmbeddingLookup:
    """Looks up tokens in ``embedding``, a model's own embedding module."""

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding
        packs = isinstance(embedding, PackedEmbedding)
        self._scale = embedding.scale if packs else embedding_scale(embedding)
        known = packs or (self._scale is not None and embedding.max_norm is None)
        self._is_known = known and not embedding._forward_pre_hooks and not embedding._forward_hooks

    def rows(self, token_ids: IntArray) -> EmbeddingRows | None:
        """Return the table in which the kernels look up ``token_ids``, or None if the module does more than a lookup.

        Raises IndexError if a token id is out of range.
        """
        weight = self._embedding.weight
        if isinstance(self._embedding, PackedEmbedding) and self._is_known:
            packed = self._embedding.packed
            _check(token_ids, packed.n, "a token id")
            return EmbeddingRows(packed, packed.n, PACKED_ROWS, self._embedding.scale)
        scales_floats = weight.dtype == torch.float32
        scaled = type(self._embedding) is not torch.nn.Embedding
        weight = weight.kept if isinstance(weight, NarrowWeight) else weight
        if self._scale is None or not self._is_known or (scaled and not scales_floats):
            return None
        if weight.dtype not in (torch.float32, torch.bfloat16) or not weight.is_contiguous():
            return None
        _check(token_ids, len(weight), "a token id")
        return EmbeddingRows(weight, len(weight), KINDS[weight.dtype], self._scale)

    def of(self, token_ids: IntArray) -> torch.Tensor:
        """Return the embeddings float32 ``[tokens, hidden]`` that the module computes."""
        return cast("torch.Tensor", self._embedding(torch.from_numpy(token_ids))).float()


class LayerLookup:
    """Looks up the embeddings of token ids that each layer of a model adds to its output. ``plan`` is the plan of these
    layers' inputs, or None if the model has no such embeddings.
    """

    def __init__(self, plan: LayerInputsPlan | None) -> None:
        self._plan = plan
        self._lookup = None if plan is None else EmbeddingLookup(plan.embedding)
        self._memory: tuple[EmbeddingRows, IntArray] | None = None

    def takes(self, vocab_size: int) -> bool:
        """Return whether the kernels can look up the embeddings of the token ids below ``vocab_size``."""
        rows = None if self._lookup is None else self._lookup.rows(np.zeros(0, dtype=np.int64))
        return self._lookup is None or (rows is not None and rows.count >= vocab_size)

    def give(self, step: Step, batch: ForwardBatch) -> None:
        """Set the embeddings of the tokens of ``batch``, the batch of ``step``. The step points into memory that this
        object keeps until the next call.

        Raises IndexError if a token id is out of range.
        """
        if self._plan is None or self._lookup is None:
            return
        ids = batch.token_ids
        if batch.replaced is not None:
            ids = ids.copy()
            ids[batch.replaced.numpy()] = self._plan.id_of_media
        rows = self._lookup.rows(ids)
        if rows is None:
            table = self._lookup.of(ids).contiguous()
            ids, rows = np.arange(len(ids)), EmbeddingRows(table, len(table), KINDS[torch.float32])
        self._memory = rows, ids
        step.layer_rows = LayerRows(rows.pointer, rows.kind, rows.scale * self._plan.scale, ids.ctypes.data)


@dataclass(frozen=True, slots=True)
class StepRotaries:
    """Rotary embeddings of a step, as input for the kernels.

    Attributes:
        structs: Structs for the kernels with pointers to the tensors of ``turns``.
        positions: int64 ``[tokens]``, indices of the rows of ``turns`` for the step's tokens.
        turns: Cosines and sines of each rotary embedding.
    """

    structs: Any
    positions: IntArray
    turns: Sequence[Turns]

    @classmethod
    def of(cls, turns: Sequence[Turns], positions: IntArray) -> "StepRotaries":
        """Return the rotary embeddings, with structs that point to the tensors of ``turns``."""
        structs = (Rotary * len(turns))(*map(_rotary, turns))
        return cls(structs, positions, turns)


def _rotary(turns: Turns) -> Rotary:
    cosines, sines, scales = turns
    return Rotary(cosines.data_ptr(), sines.data_ptr(), None if scales is None else scales.data_ptr(), cosines.shape[1])


class Rotaries:
    """Rotary embeddings of a model.

    Args:
        makers: Functions that return cosines, sines and factors of queries. The functions get int64 positions, and a
            tensor with the dtype and device of the hidden states.
        size: Sum of the numbers of rotated elements of a head over all ``makers``.
        max_len: Number of positions that the model allows.
    """

    def __init__(
        self, makers: Sequence[Callable[[torch.Tensor, torch.Tensor], Turns]], size: int, max_len: int
    ) -> None:
        self._makers = makers
        self._kept: StepRotaries | None = None
        if 8 * size * max_len <= _MAX_TABLE_BYTES:
            self._kept = StepRotaries.of(self._make(torch.arange(max_len), torch.empty(0)), np.arange(max_len))

    def of(self, positions: IntArray, like: torch.Tensor) -> StepRotaries:
        """Return the rotary embeddings at ``positions`` ``[tokens]``. Raises IndexError if a position is out of range."""
        if self._kept is None:
            return StepRotaries.of(self._make(torch.from_numpy(positions), like), np.arange(len(positions)))
        _check(positions, len(self._kept.positions), "a position")
        return StepRotaries(self._kept.structs, positions, self._kept.turns)

    def of_step(self, batch: ForwardBatch, like: torch.Tensor) -> StepRotaries:
        """Return the rotary embeddings at the positions of the tokens of ``batch``. Raises IndexError if a position is
        out of range.
        """
        if batch.rope_positions is None:
            return self.of(batch.positions, like)
        return self.of_sections(batch.rope_positions, like)

    def of_sections(self, positions: IntArray, like: torch.Tensor) -> StepRotaries:
        """Return the rotary embeddings at ``positions`` ``[3, tokens]``, for models with sections. If the three
        positions of every token are equal, precomputed embeddings are used.
        """
        same = positions[0]
        if self._kept is not None and (positions == same).all() and same.max(initial=0) < len(self._kept.positions):
            return self.of(same, like)
        return StepRotaries.of(self._make(torch.from_numpy(positions), like), np.arange(len(same)))

    def _make(self, positions: torch.Tensor, like: torch.Tensor) -> list[Turns]:
        return [make(positions, like) for make in self._makers]


def later_positions(batch: ForwardBatch, rows: IntArray, counts: IntArray) -> IntArray:
    """Return the positions of the sampled tokens that later steps of a chain compute, int64 ``[counts[0] - 1,
    requests]``.

    If a request samples fewer tokens than other requests, its last position is repeated.

    Args:
        batch: The first step of the chain.
        rows: ``[requests]``, the index of the last token of each request that samples tokens.
        counts: ``[requests]``, the number of tokens to sample, in descending order.

    Raises:
        IndexError: A block table ends before one of the positions.
        ValueError: ``counts`` is invalid.
    """
    if (
        not len(counts)
        or counts[-1] < 1
        or (counts[1:] > counts[:-1]).any()
        or len(counts) > len(batch.attention[0].seq_lens)
    ):
        raise ValueError(
            f"token counts {counts.tolist()} for {len(counts)} requests are not valid: they must be at least 1, in "
            "descending order"
        )
    last = batch.positions[rows]
    end = int((last + counts).max())
    for metadata in batch.attention:
        if end > metadata.block_table.shape[1] * metadata.block_size:
            raise IndexError(f"block table with {metadata.block_table.shape[1]} blocks ends before position {end - 1}")
    later: IntArray = last + np.minimum(np.arange(1, counts[0])[:, None], counts - 1)
    return later


def _check(indices: IntArray, end: int, what: str) -> None:
    """Raise IndexError if an index is negative or not less than ``end``. The kernels read memory without bounds checks."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < end:
        raise IndexError(
            f"{what} is out of range: found {indices.min()} to {indices.max()}, allowed are 0 to {end - 1}"
        )


class ChainedTokens:
    """Memory for the tokens that the kernels sample in a chain of steps. ``rows`` ``[requests]`` are the indices of the
    tokens with the first logits.

    Attributes:
        tokens: int64 ``[counts[0], requests]``, the sampled tokens. Elements are 0 until the kernels write them.
        positions: Positions of the step's tokens, followed by the positions of the sampled tokens.
    """

    def __init__(self, batch: ForwardBatch, draws: ChainedDraws) -> None:
        """Create the memory. Raises the errors of ``later_positions``."""
        self._batch, self._draws = batch, draws
        self._counts = np.ascontiguousarray(draws.counts)
        self._uniforms = np.ascontiguousarray(draws.uniforms)
        self.rows = batch.attention[0].query_start_loc[1 : len(self._counts) + 1] - 1
        later = later_positions(batch, self.rows, self._counts)
        self.positions = np.concatenate([batch.positions, later.ravel()])
        self.tokens: IntArray = np.zeros((len(later) + 1, len(self._counts)), dtype=np.int64)

    def struct(self, rotaries: StepRotaries, width: int, vocabulary: IntArray | None = None) -> Chain:
        """Return the struct that describes the chain for the kernels. The struct points into the arguments and into
        this object.

        Args:
            rotaries: Rotary embeddings at ``positions``.
            width: Number of logits to sample from.
            vocabulary: Token id of each column of the logits, or None if the index of each column is its token id.
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
    """Return ``embedding``. Raises IndexError if the kernels cannot look up the embedding of every token that may be
    sampled.
    """
    if embedding is None or vocab_size > embedding.count:
        raise IndexError(f"the kernels cannot look up embeddings of {vocab_size} tokens")
    return embedding


def give_media(step: Step, batch: ForwardBatch, num_layers: int) -> torch.Tensor | None:
    """Set the media inputs of ``step``: the end of the keys of each token, and deepstack embeddings, which are added
    after the first layers.

    ``batch`` is the batch of ``step``. Returns the memory of the deepstack embeddings, which must outlive the step, or
    None. Raises ValueError if the kernels would read beyond this memory.
    """
    step.key_ends, step.windowed_ends = key_ends_of(batch.attention[0]), batch.attention[0].windowed_ends
    if batch.deepstack is None:
        return None
    rows = batch.deepstack.float().contiguous()
    embedded = None if batch.embedded is None else batch.embedded.shape
    if len(rows) > num_layers or rows.shape[1:] != embedded:
        raise ValueError(
            f"deepstack embeddings have shape {list(rows.shape)}, but the model has {num_layers} layers and `embedded` has "
            f"shape {embedded}"
        )
    step.num_deepstack, step.deepstack = len(rows), rows.data_ptr()
    return rows


def expect_no_media(batch: ForwardBatch) -> None:
    """Raise ValueError if ``batch``, the first step of a chain, has media. Later steps of a chain do not support media."""
    if batch.rope_positions is not None or batch.deepstack is not None or batch.attention[0].key_ends is not None:
        raise ValueError("chained steps do not support media")
