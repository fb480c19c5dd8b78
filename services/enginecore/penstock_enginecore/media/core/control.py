"""What operators can do about media in a running engine."""

from collections.abc import Callable
from typing import Protocol

from penstock_enginecore.core.scheduler.base import Scheduler
from penstock_enginecore.core.utility import utility


class HasMedia(Protocol):
    """What ``MediaControl`` needs of an engine."""

    scheduler: Scheduler
    reset_receiver_cache: Callable[[], None]


class MediaControl:
    """Utilities of an engine, called as those of ``EngineControl`` are."""

    def __init__(self, engine: HasMedia) -> None:
        self._engine = engine

    @utility
    def reset_mm_cache(self) -> None:
        """Forget the inputs of media that are kept for frontends: what a request needs is sent again. Requests that were added
        keep theirs.
        """
        self._engine.reset_receiver_cache()

    @utility
    def reset_encoder_cache(self) -> None:
        """Forget the embeddings of media. Those that running requests need stay until they have passed them."""
        self._engine.scheduler.reset_encoder_cache()
