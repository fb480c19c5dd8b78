"""The adapter of a request, and what is known of one that is loaded."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

import msgspec

from penstock_common.lora_registry import LoraAdapter

MakeRoom: TypeAlias = "Callable[[int, Future[None]], None]"
"""Asks for so many bytes of ``lora.cpu_memory``, on any thread. The future ends on the thread that gives executors their calls,
once workers have been told what to let go of for them; with ResourceExhausted or FailedPrecondition where they cannot be had.
"""


class LoraRequest(msgspec.Struct, frozen=True):
    """The adapter that a request names. ``path``: directory that it is read from where it is not loaded. ``digest``: of its
    config and tensors, by which it is known; empty where nobody has said, then whatever is at ``path`` is meant.
    """

    name: str
    path: str
    digest: bytes = b""

    @classmethod
    def of(cls, adapter: LoraAdapter | None) -> "LoraRequest | None":
        """As it came with a request."""
        return None if adapter is None else cls(adapter.name, adapter.path, adapter.digest)


class LoadedLora(msgspec.Struct, frozen=True, tag="loaded_lora"):
    """An adapter that workers hold: ``max_rank`` of its layers, the names of the ``modules`` that it changes, and the bytes of
    its matrices.
    """

    digest: bytes
    max_rank: int
    modules: tuple[str, ...]
    num_bytes: int


class PartlyLoadedError(Exception):
    """A load that failed, of which some workers hold what they have read. ``error``: what it failed with. ``digests``: of what
    they hold, which is to be let go of unless it was held before.
    """

    def __init__(self, error: Exception, digests: frozenset[bytes]) -> None:
        super().__init__(str(error))
        self.error = error
        self.digests = digests
