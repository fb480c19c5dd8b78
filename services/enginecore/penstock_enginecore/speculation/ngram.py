"""Drafts what followed the last tokens where they came before in the same request: prompt lookup (Saxena, 2023)."""

import numpy as np
import numpy.typing as npt

from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.speculation.base import DraftRequest, DraftStep
from penstock_enginecore.speculation.ngram_base import Weightless
from penstock_enginecore.speculation.token_index import TokenIndex

_MOST = 8
"""Places that are looked at: of the newest ones, the one that is alike for longest."""


class Ngram(Weightless):
    """A ``Drafter``. ``shortest`` tokens at least must have come before; those are preferred of which more are alike, up to
    ``longest``, and of equals the newest, which follows most likely what a text is at now.
    """

    name = "ngram"

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._indices: dict[str, TokenIndex] = {}

    def begin(self, request: NewRequestData) -> None:
        """Look at its tokens once it drafts."""
        self._indices[request.request_id] = TokenIndex(self._shortest)

    def end(self, request_id: str, token_ids: npt.NDArray[np.int32], *, num_prompt_tokens: int) -> None:  # noqa: ARG002
        """Forget it."""
        self._indices.pop(request_id, None)

    def propose(self, step: DraftStep) -> list[list[int]]:
        """Nothing for requests whose last tokens are new."""
        return [self._draft(request) if request.num_drafts else [] for request in step.requests]

    def _draft(self, request: DraftRequest) -> list[int]:
        index = self._indices[request.request_id]
        index.extend(request.token_ids[len(index) :])
        tail = index.tokens[-self._longest :]
        place, _ = index.longest(tail, _MOST, self._longest)
        return index.following(place, request.num_drafts) if place >= 0 else []
