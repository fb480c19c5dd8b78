"""What the rooms of the frontend know of each other: limits go from the engines to processing, outputs come back."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from penstock_common.errors import RequestFailed
from penstock_common.types.outputs import EngineCoreOutput
from penstock_common.types.token_columns import NewTokens


class ModelLimits(NamedTuple):
    """What engines can take: tokens of prompt and output together, and the number of token ids. ``hidden_size``: numbers in a
    vector that stands for a token; 0 where none are taken, None where an engine does not say.
    """

    max_model_len: int
    vocab_size: int
    hidden_size: int | None = None


class OutputHandler(Protocol):
    """Who gets what engines produce."""

    def process(
        self, outputs: Sequence[EngineCoreOutput], engine: str, timestamp: float, tokens: Sequence[NewTokens] = ()
    ) -> Sequence[str]:
        """Take a step's outputs; returns the ids of requests that the engine need not go on with.

        ``engine``: the engine's id; ``timestamp``: when the step ended, on the engine's clock; ``tokens``: outputs that are new
        tokens and nothing else, which come before the others.
        """

    def fail(self, request_ids: Iterable[str], error: RequestFailed) -> None:
        """End these requests."""

    def fail_all(self, error: RequestFailed) -> Sequence[str]:
        """End every request; returns their ids."""

    def moved(self, request_ids: Iterable[str]) -> None:
        """These requests have lost their engine and go on elsewhere: the clock of their outputs is another one."""
