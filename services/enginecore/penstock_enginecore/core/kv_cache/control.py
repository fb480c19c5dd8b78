"""What frontends ask of the blocks that an engine can find."""

from typing import Protocol

from penstock_common.errors import InvalidArgument
from penstock_common.types.kv_transfer import KvMedium
from penstock_enginecore.core.scheduler.base import Scheduler
from penstock_enginecore.core.utility import utility

MAX_PARTS = 4096


class HasCache(Protocol):
    """What ``CacheControl`` needs of an engine."""

    @property
    def scheduler(self) -> Scheduler:
        """Whose blocks they are."""


class CacheControl:
    """Utilities of an engine, called as those of ``EngineControl`` are."""

    def __init__(self, engine: HasCache) -> None:
        self._engine = engine

    @utility
    def cached_blocks(self, part: int = 0, num_parts: int = 1, medium: KvMedium = KvMedium.DEVICE) -> bytes:
        """Digests of the blocks that can be found in a medium, one behind the other: those of one of ``num_parts`` parts, from 0,
        since the answer must fit into a message. Raises InvalidArgument for a part that there is not.
        """
        if not 1 <= num_parts <= MAX_PARTS:
            raise InvalidArgument(f"num_parts is {num_parts}; it must be from 1 to {MAX_PARTS}", field="num_parts")
        if not 0 <= part < num_parts:
            raise InvalidArgument(f"part is {part}; it must be from 0 to {num_parts - 1}", field="part")
        return b"".join(self._engine.scheduler.cached_blocks(part, num_parts, medium))

    @utility
    def num_cached_blocks(self, medium: KvMedium) -> int:
        """How many blocks can be found in a medium."""
        return self._engine.scheduler.num_cached_blocks(medium)
