"""What the engine core asks of constrained decoding. The backends live in ``penstock_enginecore.structured_output``."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock_common.errors import RequestFailed
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import EngineCoreConfig

BITS = 32
"""Tokens per word of a bitmask."""

Mask = npt.NDArray[np.int32]
"""Tokens allowed next, ``[ceil(vocab / 32)]``: bit t % 32 of word t // 32 is token t."""


class Grammar(Protocol):
    """How far one request has got in its constraint. Belongs to the busy loop's thread, and costs it next to nothing: the masks
    are computed elsewhere.
    """

    @property
    def ready(self) -> bool:
        """Whether ``mask`` is that of the next token."""

    @property
    def mask(self) -> Mask:
        """What may come next, while ``ready``. Nothing once ``terminated``."""

    @property
    def failure(self) -> RequestFailed | None:
        """Why there will be no further mask: the request must end. ``changed`` was called."""

    @property
    def terminated(self) -> bool:
        """Whether the constraint is fulfilled and the token that ends the output was accepted: nothing may follow."""

    def accept(self, token_id: int) -> bool:
        """Take in an output token while ``ready``. False when ``mask`` does not allow it; it is then not taken in."""

    @property
    def forced(self) -> Sequence[int]:
        """While ``ready``: tokens of text that must come next, as far as that is looked for. They may be cut otherwise than
        the model would: only ``mask`` says what may come.
        """

    def draft(self, token_ids: Sequence[int]) -> None:
        """While ``ready``: have the masks made behind each of the first of these tokens, which may come next."""

    @property
    def drafted(self) -> bool:
        """Whether ``draft_masks`` are there, or will not come."""

    @property
    def draft_masks(self) -> Sequence[Mask]:
        """Masks behind one draft, two, and so on, as far as the drafts are allowed and were looked at. ``accept`` of a draft
        goes on from there.
        """

    @property
    def prompt(self) -> bool:
        """Whether its masks come fast enough for a step to wait for them."""

    def wanted(self) -> bool:
        """Whether a step may take the request in: it is ``prompt``, or its mask is there. Where not, ``changed`` is called once
        it is.
        """

    def missed(self) -> bool:
        """Say that a step went on without the mask. True when it has come meanwhile; else ``changed`` is called once it has."""

    def close(self) -> None:
        """Give up what is held for the request. Idempotent."""


class GrammarBackend(Protocol):
    """Compiles constraints and follows them, both off the busy loop."""

    def check(self, constraint: StructuredOutput) -> None:
        """Refuse what can be seen to be wrong or unsupported without compiling. Any thread. Raises InvalidArgument."""

    def warm_up(self) -> "Future[None]":
        """Have everything that the first constraint would wait for. Returns at once; the future fails with a RequestFailed when
        it cannot be had now: constraints try again.
        """

    def start(
        self, constraint: StructuredOutput, prior_token_ids: Sequence[int], changed: Callable[[], None]
    ) -> "Future[Grammar]":
        """A Grammar that has taken in ``prior_token_ids`` and whose first mask is there. Returns at once.

        The future fails with a RequestFailed: InvalidArgument for a constraint that cannot be compiled, or takes too much time
        or memory, or that the tokens do not follow; ResourceExhausted for one that costs too much to follow; Internal
        otherwise. ``changed`` and callbacks on the future may run on any thread, and must not block.
        """

    def flush(self) -> None:
        """Let what was accepted since the last call be worked on. On the busy loop's thread; never blocks."""

    def wait(self, grammars: Iterable[Grammar]) -> None:
        """Wait until the masks of those are there that are ``prompt``, and those behind their drafts, but no longer than a
        step may be held up.
        """

    def shutdown(self) -> None:
        """End what is running. Idempotent."""


class GrammarBackendFactory(Protocol):
    """Makes the backend for a loaded model. Must return at once: what takes time happens in ``warm_up``."""

    def __call__(self, config: EngineCoreConfig, *, vocab_size: int, eos_token_ids: frozenset[int]) -> GrammarBackend:
        """The backend that ``config`` names, for a model with ``vocab_size`` tokens."""


def bitmask_words(vocab_size: int) -> int:
    """Words of a bitmask row."""
    return -(-vocab_size // BITS)


def allows(mask: Mask, token_id: int) -> bool:
    """Whether ``mask`` has the bit of a token."""
    return bool(int(mask[token_id // BITS]) >> (token_id % BITS) & 1)
