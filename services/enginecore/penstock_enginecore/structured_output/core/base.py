"""Interface of constrained decoding, as the engine core needs it. The backends are in
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
"""Tokens per word of a bitmask."""

Mask = npt.NDArray[np.int32]
"""Allowed next tokens, ``[ceil(vocab / 32)]``: bit t % 32 of word t // 32 is token t."""


class Grammar(Protocol):
    """State of one request in its constraint. Belongs to the busy loop's thread. It is cheap: other processes compute
    the masks.
    """

    @property
    def ready(self) -> bool:
        """Whether ``mask`` is that of the next token."""

    @property
    def mask(self) -> Mask:
        """Allowed next tokens, valid while ``ready``. Empty once ``terminated``."""

    @property
    def failure(self) -> RequestFailed | None:
        """Why there will be no further mask and the request must end, or None. ``changed`` is called when it is set."""

    @property
    def terminated(self) -> bool:
        """Whether the constraint is fulfilled and the end token was accepted, so that no token may follow."""

    def accept(self, token_id: int) -> bool:
        """Accept an output token while ``ready``. Returns False, without a change, if ``mask`` does not allow it."""

    @property
    def forced(self) -> Sequence[int]:
        """Tokens of text that must come next, while ``ready``, if this is configured. The model may tokenize the text
        differently, so only ``mask`` decides which tokens are allowed.
        """

    def draft(self, token_ids: Sequence[int]) -> None:
        """Start to compute the masks after each of these tokens, while ``ready``. The tokens are drafts."""

    @property
    def drafted(self) -> bool:
        """Whether ``draft_masks`` are complete, or will not come."""

    @property
    def draft_masks(self) -> Sequence[Mask]:
        """Masks after one draft, after two, and so on, for the drafts that are allowed and were processed. ``accept``
        of a draft continues with its mask.
        """

    @property
    def prompt(self) -> bool:
        """Whether masks arrive fast enough that a step may wait for them."""

    def wanted(self) -> bool:
        """Return whether a step may include the request: it is ``prompt``, or its mask is available. Otherwise,
        ``changed`` is called once it is.
        """

    def missed(self) -> bool:
        """Record that a step continued without the mask. Returns True if the mask has arrived meanwhile. Otherwise,
        ``changed`` is called when it arrives.
        """

    def close(self) -> None:
        """Free the resources of the request. Idempotent."""


class GrammarBackend(Protocol):
    """Compiles and follows constraints, both outside the busy loop."""

    def check(self, constraint: StructuredOutput) -> None:
        """Refuse a constraint that is obviously invalid or unsupported, without compiling it. Raises InvalidArgument.
        Thread-safe.
        """

    def warm_up(self) -> "Future[None]":
        """Prepare for the first constraint. Returns at once.

        The future fails with a RequestFailed if the preparation fails. Constraints then try again.
        """

    def start(
        self, constraint: StructuredOutput, prior_token_ids: Sequence[int], changed: Callable[[], None]
    ) -> "Future[Grammar]":
        """Start a Grammar that has accepted ``prior_token_ids``. Returns at once; the future completes when the first
        mask is available.

        ``changed`` and callbacks on the future may run on any thread, and must not block.

        Raises:
            InvalidArgument: (In the future.) The constraint cannot be compiled, takes too much time or memory, or does not
                allow the prior tokens.
            ResourceExhausted: (In the future.) The constraint costs too much to follow.
            Internal: (In the future.) Any other failure.
        """

    def flush(self) -> None:
        """Send the tokens that were accepted since the last call. Must be called on the busy loop's thread. Never
        blocks.
        """

    def wait(self, grammars: Iterable[Grammar]) -> None:
        """Wait for the masks of the grammars that are ``prompt``, and for the masks after their drafts. The wait is
        limited to the time by which a step may be delayed.
        """

    def shutdown(self) -> None:
        """End all processes. Idempotent."""


class GrammarBackendFactory(Protocol):
    """Creates the backend for a loaded model. Must return at once: slow work happens in ``warm_up``."""

    def __call__(self, config: EngineCoreConfig, *, vocab_size: int, eos_token_ids: frozenset[int]) -> GrammarBackend:
        """Create the configured backend, for a model with ``vocab_size`` tokens."""


def bitmask_words(vocab_size: int) -> int:
    """Return the number of words of a bitmask row."""
    return -(-vocab_size // BITS)


def allows(mask: Mask, token_id: int) -> bool:
    """Return whether ``mask`` has the bit of a token."""
    return bool(int(mask[token_id // BITS]) >> (token_id % BITS) & 1)
