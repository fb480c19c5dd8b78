"""Reference from a request to an adapter, and properties of a loaded adapter."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

import msgspec

from penstock_common.lora_registry import LoraAdapter

MakeRoom: TypeAlias = "Callable[[int, Future[None]], None]"
"""Function that requests a number of bytes of ``lora.cpu_memory`` and gets a future. Thread-safe.

The future completes once the workers were told to free evicted adapters. The future completes on the thread that calls
the executor. If so many bytes are not available, the future fails with ResourceExhausted or FailedPrecondition.
"""


class LoraRequest(msgspec.Struct, frozen=True):
    """Reference from a request to an adapter.

    Attributes:
        name: Label of the adapter.
        path: Directory from which the adapter is read if it is not loaded.
        digest: Digest of the adapter's config and tensors, which identifies the adapter. If it is empty, any adapter at
            ``path`` is accepted.
    """

    name: str
    path: str
    digest: bytes = b""

    @classmethod
    def of(cls, adapter: LoraAdapter | None) -> "LoraRequest | None":
        """Return the adapter reference of a received request."""
        return None if adapter is None else cls(adapter.name, adapter.path, adapter.digest)


class LoadedLora(msgspec.Struct, frozen=True, tag="loaded_lora"):
    """Properties of an adapter that workers have loaded.

    Attributes:
        max_rank: Largest rank of the adapter's layers.
        modules: Names of the modules that the adapter changes.
        num_bytes: Size of the adapter's matrices in bytes.
    """

    digest: bytes
    max_rank: int
    modules: tuple[str, ...]
    num_bytes: int


class PartlyLoadedError(Exception):
    """Raised when a load failed on some workers, but other workers have loaded the adapter.

    Attributes:
        error: The error of the load.
        digests: Digests of the adapters that some workers loaded in this load. The caller must unload each of these
            adapters, except adapters that an earlier load had already loaded.
    """

    def __init__(self, error: Exception, digests: frozenset[bytes]) -> None:
        super().__init__(str(error))
        self.error = error
        self.digests = digests
