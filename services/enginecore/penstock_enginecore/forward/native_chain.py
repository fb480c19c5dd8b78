"""What the CPU kernels' decoder takes to go on from the tokens that it chooses."""

import numpy as np

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.forward.base import ChainedDraws, ForwardBatch
from penstock_enginecore.forward.native_inputs import EmbeddingRows, StepRotaries, later_positions
from penstock_enginecore.native.ffi_structs import Chain


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
