"""FakeEngine with LoRA adapters, which it reads from a dict instead of a disk."""

import hashlib
from collections.abc import MutableMapping
from typing import Any

from penstock.common.v1 import finish_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from tests.fakes.engines.fake_engine import FakeEngine, FakeSession

Disk = MutableMapping[str, str]
"""Contents of adapters by path."""


def digest_of(content: str) -> bytes:
    """Return the digest that engines compute for this content."""
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


class LoraEngine(FakeEngine):
    """Fake engine with adapters. Requests whose digest does not match the adapter's content are refused; others load
    the adapter.

    Attributes:
        held: Loaded adapters by digest, and whether each is pinned.
        failing: Error with which every ``add_lora`` fails.
    """

    def __init__(self, engine_id: str, disk: Disk, **options: Any) -> None:
        super().__init__(engine_id, **options)
        self.disk = disk
        self.held: dict[bytes, bool] = {}
        self.failing: finish_pb2.RequestError | None = None
        self.ready.capabilities.append("lora")
        self.utilities |= {
            "add_lora": self._add_lora,
            "remove_lora": self._remove_lora,
            "pin_lora": self._pin_lora,
            "list_loras": lambda: [self._entry(digest) for digest in self.held],
        }

    def _load(self, path: str, digest: bytes) -> bytes | finish_pb2.RequestError:
        if self.failing is not None:
            return self.failing
        if (content := self.disk.get(path)) is None:
            return _error("FAILED_PRECONDITION", f"{path} has no adapter", "LORA_UNAVAILABLE")
        if digest not in (b"", found := digest_of(content)):
            return _error("FAILED_PRECONDITION", f"{path} has other content", "LORA_CHANGED")
        self.held.setdefault(found, False)
        return found

    def _add_lora(self, name: str, path: str, digest: bytes, pinned: bool) -> Any:
        found = self._load(path, digest)
        if isinstance(found, bytes):
            self.held[found] |= pinned
            return self._entry(found)
        return found

    def _remove_lora(self, digest: bytes) -> None:
        self.held.pop(digest, None)

    def _pin_lora(self, digest: bytes, pinned: bool) -> Any:
        if digest not in self.held:
            return finish_pb2.RequestError(code="NOT_FOUND", message="no such adapter", field="digest")
        self.held[digest] = pinned
        return self._entry(digest)

    def _entry(self, digest: bytes) -> dict[str, Any]:
        pinned = self.held[digest]
        return {"digest": digest, "rank": 8, "modules": ["q_proj"], "num_bytes": 1024, "pinned": pinned}

    def _add(self, message: pb.EngineCoreRequest, session: FakeSession) -> None:
        self.refusal = None
        if message.HasField("lora"):
            read = self._load(message.lora.path, message.lora.digest)
            self.refusal = read if isinstance(read, finish_pb2.RequestError) else None
        super()._add(message, session)


def _error(code: str, message: str, reason: str) -> finish_pb2.RequestError:
    return finish_pb2.RequestError(code=code, message=message, field="lora", reason=reason)
