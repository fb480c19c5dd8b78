"""Computation of the results of pooling requests from hidden states."""

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn.functional import normalize

from penstock_common.types.request import PoolingParams, PoolingTask, Vectors
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.pooling.config import Dense, PoolingMode
from penstock_enginecore.pooling.embedder import Head, PoolingModel, activate
from penstock_enginecore.pooling.token_heads import SparseHead

# Accumulators of a prompt's hidden states. A prompt may be computed in several steps.

PerToken = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that gets token IDs ``[tokens]`` and hidden states ``[tokens, hidden size]``, and returns one row per
token.
"""


class Accumulator(Protocol):
    """Interface of objects that collect the hidden states of a prompt in order, and return the rows from which the
    result is computed.
    """

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the next tokens of the prompt: their IDs, int64 ``[tokens]``, and hidden states ``[tokens, hidden
        size]``.
        """

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the collected rows ``[rows, size]`` and the token ID of each row."""


class FirstToken:
    """Accumulator that keeps the hidden state of the first token, which BERT models call CLS."""

    def __init__(self) -> None:
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Keep the first token if no token was kept before."""
        if self._kept is None:
            self._kept = token_ids[:1], hidden[:1].clone()

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one row. Raises RuntimeError before the first token."""
        return _given(self._kept)


class LastToken:
    """Accumulator that keeps the hidden state of the last token that is not the padding token ``padding``. If all
    tokens are padding, it keeps the first token, as transformers does.
    """

    def __init__(self, padding: int | None = None) -> None:
        self._padding = padding
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Replace the kept token by the last of the given tokens that is not padding."""
        last = len(token_ids) - 1
        if self._padding is not None:
            real = (token_ids != self._padding).nonzero()
            if not len(real) and self._kept is not None:
                return
            last = int(real[-1]) if len(real) else 0
        self._kept = token_ids[last : last + 1], hidden[last : last + 1].clone()

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one row. Raises RuntimeError before the first token."""
        return _given(self._kept)


class Largest:
    """Accumulator that keeps the largest value of each element over all tokens."""

    def __init__(self) -> None:
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Compare the kept values with the hidden states."""
        largest = hidden.amax(dim=0, keepdim=True)
        if self._kept is not None:
            largest = torch.maximum(self._kept[1], largest)
        self._kept = token_ids[-1:], largest

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one row, and the ID of the last token. Raises RuntimeError before the first token."""
        return _given(self._kept)


class Mean:
    """Accumulator that sums the hidden states of all tokens in float32, and divides the sum by the total weight.

    Args:
        by_position: Multiply the hidden state of a token by its position, counted from 1. Otherwise the weight is 1.
        root: Divide by the square root of the total weight.
    """

    def __init__(self, *, by_position: bool = False, root: bool = False) -> None:
        self._by_position = by_position
        self._root = root
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._last = torch.zeros(0, dtype=torch.int64)

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the hidden states to the sum."""
        hidden = hidden.float()
        if self._by_position:
            first = self._count + 1
            hidden = hidden * torch.arange(first, first + len(hidden), device=hidden.device)[:, None]
        total = hidden.sum(dim=0, keepdim=True)
        self._sum = total if self._sum is None else self._sum + total
        self._count += len(token_ids)
        self._last = token_ids[-1:]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one row with the mean, and the ID of the last token. Raises RuntimeError before the first token."""
        _, total = _given(None if self._sum is None else (self._last, self._sum))
        weight = self._count * (self._count + 1) / 2 if self._by_position else self._count
        return self._last, total / (weight**0.5 if self._root else weight)


class Joined:
    """Accumulator that joins the rows of other accumulators, each of which returns one row."""

    def __init__(self, parts: Sequence[Accumulator]) -> None:
        self._parts = parts

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the tokens to all parts."""
        for part in self._parts:
            part.add(token_ids, hidden)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one row ``[1, parts * size]``, and the token ID of the last part. Raises RuntimeError before the first
        token.
        """
        given = [part.rows() for part in self._parts]
        return given[-1][0], torch.cat([rows.float() for _, rows in given], dim=-1)


class EveryToken:
    """Accumulator that keeps one row per token. The function ``transform`` converts the hidden states of each call to
    smaller rows immediately.
    """

    def __init__(self, transform: PerToken) -> None:
        self._transform = transform
        self._token_ids: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Convert the hidden states to rows, and keep the rows."""
        self._token_ids.append(token_ids)
        self._rows.append(self._transform(token_ids, hidden))

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the IDs and rows of all tokens that were added."""
        return torch.cat(self._token_ids), torch.cat(self._rows)


def _given(kept: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
    if kept is None:
        raise RuntimeError("a prompt without tokens cannot be pooled")
    return kept


class Pooler:
    """Applies the model's pooling, its linear layers after pooling, and its classification head. Results are
    float32.
    """

    def __init__(self, model: PoolingModel) -> None:
        self._model = model

    @property
    def limits(self) -> PoolingLimits:
        """Pooling tasks and embedding size that the model supports."""
        head = self._model.head
        if head is None:
            tasks = set() if self._model.tokens.late_interaction else {PoolingTask.EMBED}
            if len(self._model.pooling.modes) == 1:  # Otherwise layers after pooling expect several joined rows.
                tasks.add(PoolingTask.TOKEN_EMBED)
            if self._model.tokens.sparse is not None:
                tasks.add(PoolingTask.SPARSE_EMBED)
            return PoolingLimits(
                tasks=frozenset(tasks),
                embedding_size=self._embedding_size(),
                limits_attention=self._model.is_encoder,
            )
        if head.per_token:
            return PoolingLimits(tasks=frozenset({PoolingTask.TOKEN_CLASSIFY}))
        tasks = {PoolingTask.CLASSIFY} | ({PoolingTask.SCORE} if head.score_activation is not None else set())
        return PoolingLimits(tasks=frozenset(tasks))

    def begin(self, params: PoolingParams) -> Accumulator:
        """Return an accumulator for the hidden states of one prompt. The caller must pass the accumulator to ``finish``
        after the last token.
        """
        match params.task:
            case PoolingTask.EMBED:
                parts = [_ACCUMULATORS[mode]() for mode in self._model.pooling.modes]
                return parts[0] if len(parts) == 1 else Joined(parts)
            case PoolingTask.TOKEN_EMBED:
                return EveryToken(lambda _, hidden: self._embedding(hidden, params, self._token_layers))
            case PoolingTask.SPARSE_EMBED:
                return EveryToken(lambda _, hidden: self._sparse.weights(hidden))
            case PoolingTask.TOKEN_CLASSIFY:
                return EveryToken(self._head)
            case _:
                # The head of an encoder model selects rows from all tokens. The head of a decoder model uses the last
                # token.
                if self._model.is_encoder:
                    return EveryToken(lambda _, hidden: hidden)
                return LastToken(self._model.module.config.pad_token_id)

    def finish(self, params: PoolingParams, gathered: Accumulator) -> Vectors:
        """Return the pooling result of a prompt, after all its hidden states were added to the accumulator."""
        token_ids, rows = gathered.rows()
        match params.task:
            case PoolingTask.EMBED:
                return _vectors(self._embedding(rows, params, self._model.dense)[0])
            case PoolingTask.TOKEN_EMBED:
                return _vectors(rows[1:] if self._model.tokens.skips_first else rows)
            case PoolingTask.SPARSE_EMBED:
                return _vectors(self._sparse.merge(token_ids, rows))
            case PoolingTask.TOKEN_CLASSIFY:
                return _vectors(self._activated(rows, params))
            case _:
                return _vectors(self._activated(self._head(token_ids, rows), params))

    @property
    def _head(self) -> Head:
        if self._model.head is None:
            raise RuntimeError("the model has no classification head")
        return self._model.head

    @property
    def _sparse(self) -> SparseHead:
        if self._model.tokens.sparse is None:
            raise RuntimeError("the model has no layer for sparse embeddings")
        return self._model.tokens.sparse

    @property
    def _token_layers(self) -> Sequence[Dense]:
        projection = self._model.tokens.projection
        return self._model.dense if projection is None else projection

    def _embedding_size(self) -> int:
        layers = self._token_layers if self._model.tokens.late_interaction else self._model.dense
        joined = len(self._model.pooling.modes) * int(self._model.module.config.hidden_size)
        return layers[-1].linear.out_features if layers else joined

    def _embedding(self, rows: torch.Tensor, params: PoolingParams, layers: Sequence[Dense]) -> torch.Tensor:
        """Return the embeddings ``[rows, dimensions]`` for rows ``[rows, hidden size]``. The linear layers are applied
        first, then the embeddings are truncated, then normalized.
        """
        rows = rows.float()
        for layer in layers:
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


_ACCUMULATORS: dict[PoolingMode, Callable[[], Accumulator]] = {
    "cls": FirstToken,
    "max": Largest,
    "mean": Mean,
    "mean_sqrt_len_tokens": functools.partial(Mean, root=True),
    "weightedmean": functools.partial(Mean, by_position=True),
    "lasttoken": LastToken,
}


def _vectors(rows: torch.Tensor) -> Vectors:
    array = rows.to("cpu", torch.float32).numpy()
    return Vectors(array.shape, array.astype("<f4").tobytes())
