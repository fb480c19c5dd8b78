"""What the scheduler asks of constrained decoding. The backends live in ``penstock_enginecore.structured_output``."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import EngineCoreConfig

BITS = 32
"""Tokens per word of a bitmask."""


class Grammar(Protocol):
    """How far one request has got in its constraint. Belongs to the busy loop's thread."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Take output tokens in. False when one of them is not allowed; it and those behind it are then not taken in."""

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write the tokens allowed next into ``row`` ``[ceil(vocab / 32)]``: bit t % 32 of word t // 32 is token t."""

    @property
    def terminated(self) -> bool:
        """Whether the constraint is fulfilled and the token that ends the output was accepted: nothing may follow."""


GrammarFactory = Callable[[], Grammar]
"""A compiled constraint: each call gives a Grammar at its beginning."""


class GrammarBackend(Protocol):
    """Compiles constraints off the busy loop."""

    def check(self, constraint: StructuredOutput) -> None:
        """Refuse what can be seen to be wrong or unsupported without compiling. Any thread. Raises InvalidArgument."""

    def compile(self, constraint: StructuredOutput) -> "Future[GrammarFactory]":
        """Compile, or find compiled. The future fails with a RequestFailed: InvalidArgument for a constraint that cannot be
        compiled or takes too much time or memory, Internal otherwise. Returns at once; a callback on the future may run on any
        thread.
        """

    def shutdown(self) -> None:
        """End what is running. Idempotent."""


class GrammarBackendFactory(Protocol):
    """Makes the backend for a loaded model. Must return at once: what takes time happens at the first constraint."""

    def __call__(self, config: EngineCoreConfig, *, vocab_size: int, eos_token_ids: frozenset[int]) -> GrammarBackend:
        """The backend that ``config`` names, for a model with ``vocab_size`` tokens."""


def bitmask_words(vocab_size: int) -> int:
    """Words of a bitmask row."""
    return -(-vocab_size // BITS)
