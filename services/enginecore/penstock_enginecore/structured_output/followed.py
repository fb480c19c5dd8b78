"""A grammar that is followed in another process: what the engine knows of it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from penstock_common.errors import RequestFailed
from penstock_enginecore.structured_output.core.base import Grammar, Mask, allows

NO_MASK = np.zeros(0, np.int32)


class CompiledConstraint:
    """A compiled grammar, serialized, and what to call its constraint in errors."""

    def __init__(self, number: int, field: str, text: bytes) -> None:
        self.number = number
        self.field = field
        self.text = text


class Follows(Protocol):
    """Who has the process tell what its grammars allow. ``patience``: seconds of processor time of a token, above which no step
    waits for the next mask.
    """

    eos_token_ids: frozenset[int]
    patience: float

    def advance(self, grammar: "FollowedGrammar", token_id: int) -> None:
        """Take in a token that the mask allows."""

    def draft(self, grammar: "FollowedGrammar", token_ids: Sequence[int]) -> None:
        """Have the masks made behind tokens that may come next."""

    def missed(self, grammar: "FollowedGrammar") -> bool:
        """Note that a step went on without the mask. True when it has come meanwhile; else ``changed`` is called once it has."""

    def forget(self, grammar: "FollowedGrammar") -> None:
        """Do nothing more for a request."""


class FollowedGrammar:
    """A ``Grammar``. ``number`` names it to the process, ``compiled`` is what it follows. A mask says itself what may come, so
    the busy loop takes a token in without asking the process.
    """

    def __init__(
        self,
        follower: "Follows",
        number: int,
        compiled: CompiledConstraint,
        tokens: Sequence[int],
        changed: Callable[[], None],
    ) -> None:
        self._follower = follower
        self.number = number
        self.compiled = compiled
        self.tokens = list(tokens)
        self.changed = changed
        self.begun: Future[Grammar] = Future()
        self.mask: Mask = NO_MASK
        self.ready = False
        self.failure: RequestFailed | None = None
        self.terminated = False
        self.late = False
        self.cost = 0.0
        self.forced: Sequence[int] = ()
        self.drafts: list[int] = []
        self.draft_masks: list[Mask] = []
        self.drafted = True
        self.turn = 0
        self.num_processes_ended = 0

    def accept(self, token_id: int) -> bool:
        """Take in an output token. The one that ends the output needs no mask behind it."""
        if self.terminated or not self.ready or not allows(self.mask, token_id):
            return False
        if token_id in self._follower.eos_token_ids:
            self.terminated, self.mask = True, np.zeros_like(self.mask)
        else:
            self._follower.advance(self, token_id)
        return True

    def draft(self, token_ids: Sequence[int]) -> None:
        self._follower.draft(self, token_ids)

    @property
    def prompt(self) -> bool:
        """Whether a step may wait for the mask."""
        return self.cost <= self._follower.patience

    def wanted(self) -> bool:
        """Whether a step may take the request in."""
        return self.prompt or self.missed()

    def missed(self) -> bool:
        """Whether the mask has come after all; else ``changed`` is called once it has."""
        return self._follower.missed(self)

    def close(self) -> None:
        """Let the process forget the request."""
        self._follower.forget(self)
