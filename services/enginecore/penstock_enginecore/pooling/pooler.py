"""From hidden states to the vectors a pooling request asked for."""

from collections.abc import Callable

import torch
from torch.nn.functional import normalize

from penstock_common.types.pooling import PoolingParams, PoolingTask, Vectors
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.pooling.accumulate import Accumulator, EveryToken, FirstToken, LastToken, Mean
from penstock_enginecore.pooling.embedder import PoolingModel
from penstock_enginecore.pooling.heads import Head, activate


class Pooler:
    """Knows the model's pooling, its dense layers and its head. Results are float32."""

    def __init__(self, model: PoolingModel) -> None:
        self._model = model

    @property
    def limits(self) -> PoolingLimits:
        """What can be asked for."""
        head = self._model.head
        if head is None:
            return PoolingLimits(
                tasks=frozenset({PoolingTask.EMBED, PoolingTask.TOKEN_EMBED}), embedding_size=self._embedding_size()
            )
        if head.per_token:
            return PoolingLimits(tasks=frozenset({PoolingTask.TOKEN_CLASSIFY}))
        tasks = {PoolingTask.CLASSIFY} | ({PoolingTask.SCORE} if head.score_activation is not None else set())
        return PoolingLimits(tasks=frozenset(tasks))

    def begin(self, params: PoolingParams) -> Accumulator:
        """What gathers the hidden states of one prompt, step by step, for ``finish``."""
        match params.task:
            case PoolingTask.EMBED:
                return _ACCUMULATORS[self._model.pooling.mode]()
            case PoolingTask.TOKEN_EMBED:
                return EveryToken(lambda _, hidden: self._embedding(hidden, params))
            case PoolingTask.TOKEN_CLASSIFY:
                return EveryToken(self._head)
            case _:
                # An encoder's head picks its rows among all of them; a decoder's takes the last token.
                if self._model.is_encoder:
                    return EveryToken(lambda _, hidden: hidden)
                return LastToken(self._model.module.config.pad_token_id)

    def finish(self, params: PoolingParams, gathered: Accumulator) -> Vectors:
        """The result of a prompt whose hidden states have all been gathered."""
        token_ids, rows = gathered.rows()
        match params.task:
            case PoolingTask.EMBED:
                return _vectors(self._embedding(rows, params)[0])
            case PoolingTask.TOKEN_EMBED:
                return _vectors(rows)
            case PoolingTask.TOKEN_CLASSIFY:
                return _vectors(self._activated(rows, params))
            case _:
                return _vectors(self._activated(self._head(token_ids, rows), params))

    @property
    def _head(self) -> Head:
        if self._model.head is None:
            raise RuntimeError("the model has no classification head")
        return self._model.head

    def _embedding_size(self) -> int:
        dense = self._model.pooling.dense
        return dense[-1].out_features if dense else int(self._model.module.config.hidden_size)

    def _embedding(self, rows: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Rows ``[rows, hidden size]`` as vectors ``[rows, dimensions]``: dense layers, the cut, then length one."""
        rows = rows.float()
        for layer in self._model.dense:
            rows = layer(rows)
        if params.dimensions is not None:
            rows = rows[:, : params.dimensions]
        wanted = self._model.pooling.normalize if params.normalize is None else params.normalize
        return normalize(rows, dim=-1) if wanted else rows

    def _activated(self, scores: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        if not params.use_activation:
            return scores
        head = self._head
        if params.task is PoolingTask.SCORE:
            return activate(scores, head.score_activation or "none")
        return activate(scores, head.activation)


_ACCUMULATORS: dict[str, Callable[[], Accumulator]] = {"cls": FirstToken, "mean": Mean, "lasttoken": LastToken}


def _vectors(rows: torch.Tensor) -> Vectors:
    array = rows.to("cpu", torch.float32).numpy()
    return Vectors(array.shape, array.astype("<f4").tobytes())
