"""The adapters that a worker holds."""

import threading
from collections.abc import Callable
from typing import TypeAlias

from transformers import PreTrainedModel

from penstock_common.errors import FailedPrecondition, RequestFailed, Unavailable
from penstock_enginecore.config import LoraConfig
from penstock_enginecore.core.lora.request import LoadedLora, LoraRequest
from penstock_enginecore.forward.base import AdaptedForward
from penstock_enginecore.lora.adapter import LoraAdapter
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.peft_adapter import LoraLimits, read_adapter
from penstock_enginecore.lora.target import AdapterTarget
from penstock_enginecore.models.errors import ModelLoadError

ReadAdapter: TypeAlias = Callable[[str], LoraAdapter]
"""Reads the adapter in a directory. Raises LoraError."""
MakeReader: TypeAlias = Callable[[PreTrainedModel, LoraConfig], ReadAdapter]
"""Makes what reads adapters of a model, whose modules are as they were loaded."""

_UNREADABLE = (LoraReason.NOT_FOUND, LoraReason.UNREADABLE)


def peft_reader(module: PreTrainedModel, config: LoraConfig) -> ReadAdapter:
    """Reads adapters as PEFT saves them."""
    target, limits = AdapterTarget.of(module), LoraLimits(config.max_lora_rank)
    return lambda path: read_adapter(path, target, limits)


class LoraStore:
    """By digest, in the forward pass. ``read`` may be called on any thread while steps run; the other methods between steps.

    Matrices are the forward pass' to keep. What is held here says where they can be read again, once the engine has slept
    without its weights.
    """

    def __init__(self) -> None:
        self._read: ReadAdapter | None = None
        self._forward: AdaptedForward | None = None
        self._held: dict[bytes, tuple[LoraRequest, LoadedLora]] = {}
        self._lock = threading.Lock()  # of what was read last, for whoever reads

    def __len__(self) -> int:
        return len(self._held)

    def attach(self, forward: AdaptedForward | None, read: ReadAdapter | None, model: str) -> None:
        """Hold adapters in this forward pass from now on; those that there are are read again. ``model``: what it is called.
        Raises ModelLoadError where it takes none, and as ``read``.
        """
        if forward is None or read is None:
            raise ModelLoadError(f"lora.max_loras is set, and {model} takes no LoRA adapters: use 0")
        self._forward, self._read = forward, read
        for lora, loaded in list(self._held.values()):
            forward.add_adapter(self.read(LoraRequest(lora.name, lora.path, loaded.digest)))

    def read(self, lora: LoraRequest) -> LoraAdapter:
        """Read an adapter, one after the other. Raises Unavailable where that fails, FailedPrecondition for one that is not
        served, or is not what ``lora`` says.
        """
        if self._read is None:
            raise RuntimeError("attach must come before the first adapter")
        name = f"adapter {lora.name!r}" if lora.name else "the adapter"
        try:
            with self._lock:
                adapter = self._read(lora.path)
        except LoraError as e:
            if e.reason in _UNREADABLE:
                raise _unavailable(name, lora, e) from e
            raise FailedPrecondition(
                f"{name} at {lora.path!r} is not served: {e}", field="lora", reason="LORA_REFUSED"
            ) from e
        except OSError as e:
            raise _unavailable(name, lora, e) from e
        if lora.digest and adapter.digest != lora.digest:
            raise FailedPrecondition(
                f"{name} at {lora.path!r} has changed: its digest is {adapter.digest.hex()}, not {lora.digest.hex()}",
                field="lora",
                reason="LORA_CHANGED",
            )
        return adapter

    def add(self, lora: LoraRequest, adapter: LoraAdapter) -> LoadedLora:
        """Hold what was read for ``lora``; while there is no forward pass, it is read again for the next. Raises
        FailedPrecondition with what the forward pass finds wrong with it.
        """
        digest = adapter.digest
        if digest in self._held:
            return self._held[digest][1]
        try:
            if self._forward is not None:
                self._forward.add_adapter(adapter)
        except ValueError as e:
            raise FailedPrecondition(
                f"adapter {lora.name!r} at {lora.path!r} is not served: {e}", field="lora", reason="LORA_REFUSED"
            ) from e
        loaded = LoadedLora(digest, adapter.max_rank, tuple(sorted(adapter.updates)), adapter.num_bytes)
        self._held[digest] = lora, loaded
        return loaded

    def remove(self, digest: bytes) -> None:
        """Let go of an adapter; one that is not there is passed over."""
        if self._held.pop(digest, None) is not None and self._forward is not None:
            self._forward.remove_adapter(digest)

    def detach(self) -> None:
        """The forward pass is gone, until ``attach``."""
        self._forward = None


def _unavailable(name: str, lora: LoraRequest, error: Exception) -> RequestFailed:
    return Unavailable(f"{name} cannot be read from {lora.path!r}: {error}", field="lora", reason="LORA_UNAVAILABLE")
