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
"""Number of tokens whose bits one int32 word of a bitmask contains."""

Mask = npt.NDArray[np.int32]
"""Bit mask of the allowed next tokens, int32 ``[ceil(vocab / 32)]``. Bit t % 32 of word t // 32 is set if token t is
allowed.
"""


class Grammar(Protocol):
    """State of the grammar that constrains one request. Only the busy loop's thread may use the object. The methods
    take little time, because other processes compute the masks.
    """

    @property
    def ready(self) -> bool:
        """Whether ``mask`` is the mask for the request's next token."""

    @property
    def mask(self) -> Mask:
        """Mask of the allowed next tokens, valid while ``ready`` is true. Once ``terminated`` is true, the mask allows
        no token.
        """

    @property
    def failure(self) -> RequestFailed | None:
        """The reason why no more masks will arrive and the request must end, or None. When the value is set, the
        callback ``changed`` is called.
        """

    @property
    def terminated(self) -> bool:
        """Whether the constraint is fulfilled and an end-of-sequence token was accepted, so that no more tokens are
        allowed.
        """

    def accept(self, token_id: int) -> bool:
        """Advance the grammar by an output token. ``ready`` must be true. If ``mask`` does not allow the token, change
        nothing and return False.
        """

    @property
    def forced(self) -> Sequence[int]:
        """Tokens of the text that the grammar requires next. The value is valid while ``ready`` is true, and empty if
        the search for such text is not enabled. The model may tokenize the text differently, so only ``mask`` decides
        which tokens are allowed.
        """

    def draft(self, token_ids: Sequence[int]) -> None:
        """Start to compute the mask after each of these draft tokens. ``ready`` must be true."""

    @property
    def drafted(self) -> bool:
        """Whether ``draft_masks`` will no longer change, because the masks are complete or no more masks will
        arrive.
        """

    @property
    def draft_masks(self) -> Sequence[Mask]:
        """Masks after the first draft token, after the first two draft tokens, and so on. The list ends at the first
        draft token that the grammar does not allow or that was not processed. When ``accept`` gets the next draft
        token, the mask after this token becomes ``mask``.
        """

    @property
    def prompt(self) -> bool:
        """Whether the request's masks arrive fast enough that a step may wait for them."""

    def wanted(self) -> bool:
        """Return whether a step may include the request, because ``prompt`` is true or the next mask is available. If
        the result is False, ``changed`` is called once the mask is available.
        """

    def missed(self) -> bool:
        """Record that a step continued without the request's mask. Return True if the mask has arrived meanwhile.
        Otherwise return False and call ``changed`` when the mask arrives.
        """

    def close(self) -> None:
        """Free the resources of the grammar. Idempotent."""


class GrammarBackend(Protocol):
    """Interface of a component that compiles constraints and computes masks outside the busy loop."""

    def check(self, constraint: StructuredOutput) -> None:
        """Raise InvalidArgument if a constraint is obviously invalid or unsupported, without compiling it. Thread-safe."""

    def warm_up(self) -> "Future[None]":
        """Prepare for the first constraint. The call returns without waiting.

        If the preparation fails, the returned future fails with a RequestFailed. Each later constraint then tries the
        preparation again.
        """

    def start(
        self, constraint: StructuredOutput, prior_token_ids: Sequence[int], changed: Callable[[], None]
    ) -> "Future[Grammar]":
        """Start a Grammar that has already accepted ``prior_token_ids``. The call returns without waiting. The returned
        future completes when the first mask is available.

        ``changed`` and callbacks on the future may run on any thread, and must not block.

        Raises:
            InvalidArgument: (In the future.) The constraint cannot be compiled, takes too much time or memory, or does
                not allow the prior tokens.
            ResourceExhausted: (In the future.) The masks of the constraint take too much CPU time or memory.
            Internal: (In the future.) Any other failure.
        """

    def flush(self) -> None:
        """Send the tokens that grammars accepted since the last call to the process that computes masks. Only the busy
        loop's thread may call this method. The call never blocks.
        """

    def wait(self, grammars: Iterable[Grammar]) -> None:
        """Wait for the next masks of the grammars whose ``prompt`` is true, and for the masks after their draft
        tokens. The wait is never longer than a step may be delayed.
        """

    def shutdown(self) -> None:
        """End all processes of the backend. Idempotent."""


class GrammarBackendFactory(Protocol):
    """Function that creates the backend for a loaded model. The function must return without slow work, which belongs
    into ``warm_up``.
    """

    def __call__(self, config: EngineCoreConfig, *, vocab_size: int, eos_token_ids: frozenset[int]) -> GrammarBackend:
        """Create the configured backend, for a model with ``vocab_size`` tokens."""


def bitmask_words(vocab_size: int) -> int:
    """Return the number of int32 words in a bitmask for ``vocab_size`` tokens."""
    return -(-vocab_size // BITS)


def allows(mask: Mask, token_id: int) -> bool:
    """Return whether ``mask`` allows a token."""
    return bool(int(mask[token_id // BITS]) >> (token_id % BITS) & 1)
