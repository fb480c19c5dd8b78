"""Constraints of a real backend, advanced step by step by a test."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import xgrammar

from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.structured_output.backend import XgrammarBackend
from penstock_enginecore.structured_output.core.base import Grammar, GrammarBackend, Mask
from penstock_enginecore.structured_output.matcher import XgrammarGrammar
from tests.fakes.patience import PATIENCE

TIMEOUT = PATIENCE


class Walk(Protocol):
    """Interface of a constraint that a test advances."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Take tokens in up to the first that is not allowed."""

    def fill(self, row: Mask) -> None:
        """Write the mask into a row of at least its length."""

    @property
    def terminated(self) -> bool:
        """Whether nothing may follow."""


class Followed:
    """Constraint in the backend's process. It waits for every mask."""

    def __init__(self, backend: GrammarBackend, grammar: Grammar) -> None:
        self._backend = backend
        self.grammar = grammar

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Take tokens in up to the first that is not allowed."""
        for token in token_ids:
            if not self.grammar.accept(token):
                return False
            self.settle()
        return True

    def settle(self) -> None:
        """Wait until a mask is available. Raises the error if the constraint fails."""
        self._backend.flush()
        while not (self.grammar.ready or self.grammar.failure or self.terminated):
            self._backend.wait([self.grammar])
        if self.grammar.failure is not None:
            raise self.grammar.failure

    def fill(self, row: Mask) -> None:
        """Write the mask into a row of at least its length."""
        row[:] = 0
        row[: len(self.grammar.mask)] = self.grammar.mask

    @property
    def terminated(self) -> bool:
        """Whether nothing may follow."""
        return self.grammar.terminated


def follow(backend: GrammarBackend, prior: Sequence[int] = (), **constraint: Any) -> Followed:
    """Compile a constraint and advance it by ``prior``. Raises the error of an invalid constraint."""
    started = backend.start(StructuredOutput(**constraint), prior, lambda: None)
    return Followed(backend, started.result(TIMEOUT))


def follow_here(backend: XgrammarBackend, **constraint: Any) -> Walk:
    """Compile a constraint in this process, for tests of the allowed tokens that need no child process."""
    compiled = backend.compile(StructuredOutput(**constraint)).result(TIMEOUT)
    assert backend._tokenizer is not None
    info = xgrammar.TokenizerInfo.deserialize_json(backend._tokenizer.decode())
    grammar = xgrammar.CompiledGrammar.deserialize_json(compiled.text.decode(), info)
    return XgrammarGrammar(grammar, info.vocab_size)


def allowed(mask: Mask) -> set[int]:
    """Return the tokens that a mask allows."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
