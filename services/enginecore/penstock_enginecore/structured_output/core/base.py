"""Interface between the engine core and constrained decoding. The backends are in
``penstock_enginecore.structured_output``.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock_common.errors import RequestFailed
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import EngineCoreConfig

BITS = 32
"""Number of tokens per word of a bitmask."""

Mask = npt.NDArray[np.int32]
"""Allowed next tokens, ``[ceil(vocab / 32)]``. Bit t % 32 of word t // 32 is set if token t is allowed."""


class Grammar(Protocol):
    """State of one request's grammar. Only the busy loop's thread may use the object. Its methods are cheap, because
    other processes compute the masks.
    """

    @property
    def ready(self) -> bool:
        """Whether ``mask`` is the mask of the next token."""

    @property
    def mask(self) -> Mask:
        """Allowed next tokens, valid while ``ready``. Empty once ``terminated``."""

    @property
    def failure(self) -> RequestFailed | None:
        """The reason why no more masks will arrive and the request must end, or None. ``changed`` is called when this
        is set.
        """

    @property
    def terminated(self) -> bool:
        """Whether the constraint is fulfilled and the end token was accepted, so that no more tokens are allowed."""

    def accept(self, token_id: int) -> bool:
        """Accept an output token. Call only while ``ready``. If ``mask`` does not allow the token, change nothing and
        return False.
        """

    @property
    def forced(self) -> Sequence[int]:
        """Tokens of the text that the grammar requires next. Valid while ``ready``, and empty if this search is not
        configured. The model may tokenize the text differently, so only ``mask`` decides which tokens are allowed.
        """

    def draft(self, token_ids: Sequence[int]) -> None:
        """Start to compute the mask after each of these draft tokens. Call only while ``ready``."""

    @property
    def drafted(self) -> bool:
        """Whether ``draft_masks`` will no longer change: they are complete, or no more will arrive."""

    @property
    def draft_masks(self) -> Sequence[Mask]:
        """Masks after one draft, after two drafts, and so on, for drafts that the grammar allows and that were
        processed. When ``accept`` gets a draft, the draft's mask becomes ``mask``.
        """

    @property
    def prompt(self) -> bool:
        """Whether masks arrive fast enough that a step may wait for them."""

    def wanted(self) -> bool:
        """Return whether a step may include the request, because ``prompt`` is true or the mask is available.
        Otherwise, ``changed`` is called once the mask is available.
        """

    def missed(self) -> bool:
        """Record that a step continued without the mask. Returns True if the mask has arrived meanwhile. Otherwise,
        ``changed`` is called when the mask arrives.
        """

    def close(self) -> None:
        """Free the resources of the grammar. Idempotent."""


class GrammarBackend(Protocol):
    """Compiles constraints and computes masks, both outside the busy loop."""

    def check(self, constraint: StructuredOutput) -> None:
        """Raise InvalidArgument if a constraint is obviously invalid or unsupported, without compiling it. Thread-safe."""

    def warm_up(self) -> "Future[None]":
        """Prepare for the first constraint. Returns without waiting.

        If the preparation fails, the future fails with a RequestFailed. Each constraint then repeats the preparation.
        """

    def start(
        self, constraint: StructuredOutput, prior_token_ids: Sequence[int], changed: Callable[[], None]
    ) -> "Future[Grammar]":
        """Start a Grammar that has accepted ``prior_token_ids``. Returns without waiting. The future completes when the
        first mask is available.

        ``changed`` and callbacks on the future may run on any thread, and must not block.

        Raises:
            InvalidArgument: (In the future.) The constraint cannot be compiled, takes too much time or memory, or does
                not allow the prior tokens.
            ResourceExhausted: (In the future.) The masks of the constraint take too much CPU time or memory.
            Internal: (In the future.) Any other failure.
        """

    def flush(self) -> None:
        """Send the tokens that were accepted since the last call. Only the busy loop's thread may call this. Never
        blocks.
        """

    def wait(self, grammars: Iterable[Grammar]) -> None:
        """Wait for the masks of the grammars that are ``prompt``, and for the masks after their drafts. The wait is
        never longer than a step may be delayed.
        """

    def shutdown(self) -> None:
        """End all processes. Idempotent."""


class GrammarBackendFactory(Protocol):
    """Creates the backend for a loaded model. Must return without slow work, which belongs into ``warm_up``."""

    def __call__(self, config: EngineCoreConfig, *, vocab_size: int, eos_token_ids: frozenset[int]) -> GrammarBackend:
        """Create the configured backend, for a model with ``vocab_size`` tokens."""


def bitmask_words(vocab_size: int) -> int:
    """Return the number of words of a bitmask row."""
    return -(-vocab_size // BITS)


def allows(mask: Mask, token_id: int) -> bool:
    """Return whether ``mask`` has the bit of a token."""
    return bool(int(mask[token_id // BITS]) >> (token_id % BITS) & 1)
