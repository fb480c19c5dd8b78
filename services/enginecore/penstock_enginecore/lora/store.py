"""Adapters of a worker, and the readers that read adapters from files for the worker's model."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import PreTrainedModel

from penstock_common.errors import LONGEST_PATH, FailedPrecondition, RequestFailed, Unavailable, quoted
from penstock_enginecore.config import LoraConfig
from penstock_enginecore.lora.adapter import AdaptedForward, AdapterPart, LoraAdapter, OwnFeatures, TakeAdapter
from penstock_enginecore.lora.adapter_files import ReadBefore
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest, PartlyLoadedError
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.peft_adapter import LoraLimits, adapter_bytes, read_adapter
from penstock_enginecore.lora.target import AdapterTarget
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.worker.device_thread import DeviceThread
from penstock_enginecore.worker.failures import Failure
from penstock_enginecore.worker.messages import Loaded, LoadLora

ReadAdapter: TypeAlias = Callable[[str], LoraAdapter]
"""Function that reads the adapter in a directory. Raises LoraError if the adapter cannot be read or used."""
MakeReader: TypeAlias = Callable[[PreTrainedModel, LoraConfig], ReadAdapter]
"""Function that creates a reader for adapters of a model. When the function is called, the model's weights must not be
split among ranks or packed by kernels yet.
"""

SizeAdapter: TypeAlias = Callable[[str, LoraConfig], int]
"""Function that returns the size in bytes of an adapter's matrices in memory, without reading the matrices. Raises
LoraError.
"""

_UNREADABLE = (LoraReason.NOT_FOUND, LoraReason.UNREADABLE)


def peft_reader(module: PreTrainedModel, config: LoraConfig) -> ReadAdapter:
    """Return a reader for adapters in PEFT's format."""
    target, limits, before = AdapterTarget.of(module), LoraLimits(config.max_lora_rank), ReadBefore()
    return lambda path: read_adapter(path, target, limits, before)


def peft_size(path: str, config: LoraConfig) -> int:
    """Return the size in memory of an adapter in PEFT's format, in bytes."""
    return adapter_bytes(path, LoraLimits(config.max_lora_rank))


@contextmanager
def telling_of(lora: LoraRequest) -> Iterator[None]:
    """Convert errors of an adapter's files to errors of the request.

    Raises:
        Unavailable: The files cannot be read.
        FailedPrecondition: The adapter is not supported.
    """
    try:
        yield
    except LoraError as e:
        raise (_unavailable if e.reason in _UNREADABLE else _refused)(lora, e) from e
    except OSError as e:
        raise _unavailable(lora, e) from e


class ReadyLora(NamedTuple):
    """An adapter that was read from the files to which ``lora`` refers, and was prepared for the forward pass.

    Attributes:
        forward: The forward pass for which the adapter was prepared, or None if there was no forward pass.
        take: Adds the prepared adapter to ``forward``. None if there was no forward pass.
    """

    lora: LoraRequest
    loaded: LoadedLora
    forward: AdaptedForward | None
    take: TakeAdapter | None


class LoraStore:
    """Tracks a worker's adapters by digest. The forward pass stores the matrices.

    ``read`` and ``prepare`` may be called on any thread while steps run. The other methods must be called between
    steps. The store keeps the paths of adapters. If the engine sleeps and drops its weights, the adapters are read
    again after the sleep.
    """

    def __init__(self) -> None:
        self._read: ReadAdapter | None = None
        self._forward: AdaptedForward | None = None
        self._held: dict[bytes, tuple[LoraRequest, LoadedLora]] = {}
        self._lock = threading.Lock()  # This lock allows only one read at a time.

    def __len__(self) -> int:
        return len(self._held)

    @property
    def digests(self) -> list[bytes]:
        """Digests of the worker's adapters."""
        return list(self._held)

    def attach(self, forward: AdaptedForward | None, read: ReadAdapter | None, model: str) -> None:
        """Use ``forward`` for adapters from now on. Adapters that are already in the store are read again.

        Args:
            forward: The model's forward pass, or None if it supports no adapters.
            read: Reads adapters for the model, or None.
            model: Name of the model, for error messages.

        Raises:
            ModelLoadError: The forward pass does not support adapters.
            RequestFailed: An adapter cannot be read again, see ``read``.
        """
        if forward is None or read is None:
            raise ModelLoadError(
                f"lora.max_loras is set, but {model} does not support LoRA adapters; set lora.max_loras to 0"
            )
        self._forward, self._read = forward, read
        for lora, loaded in list(self._held.values()):
            forward.add_adapter(self.read(LoraRequest(lora.name, lora.path, loaded.digest)))

    def read(self, lora: LoraRequest) -> LoraAdapter:
        """Read an adapter. Only one thread reads at a time.

        Raises:
            Unavailable: The files cannot be read.
            FailedPrecondition: The adapter is not supported, or its digest differs from the digest in ``lora``.
        """
        if self._read is None:
            raise RuntimeError("an adapter was read before attach was called")
        with self._lock, telling_of(lora):
            adapter = self._read(lora.path)
        if lora.digest and adapter.digest != lora.digest:
            raise FailedPrecondition(
                f"{_called(lora)} at {quoted(lora.path, LONGEST_PATH)} has changed: its digest is {adapter.digest.hex()}, "
                f"not {lora.digest.hex()}",
                field="lora",
                reason="LORA_CHANGED",
            )
        return adapter

    def prepare(self, lora: LoraRequest, adapter: LoraAdapter) -> ReadyLora:
        """Convert an adapter to the format of the forward pass. Raises FailedPrecondition if the forward pass refuses
        the adapter.
        """
        loaded = LoadedLora(adapter.digest, adapter.max_rank, tuple(sorted(adapter.updates)), adapter.num_bytes)
        forward = self._forward
        try:
            take = None if forward is None else forward.prepare_adapter(adapter)
        except ValueError as e:
            raise _refused(lora, e) from e
        return ReadyLora(lora, loaded, forward, take)

    def add(self, ready: ReadyLora) -> LoadedLora:
        """Add a prepared adapter.

        If there is no forward pass, the adapter is read again when the next forward pass is attached. If the forward
        pass has changed since ``prepare``, the adapter is read again now. In that case, the errors of ``read`` may be
        raised.
        """
        lora, loaded, forward, take = ready
        if (held := self._held.get(loaded.digest)) is not None:
            return held[1]
        if self._forward is forward and take is not None:
            take()
        elif self._forward is not None:
            self._forward.add_adapter(self.read(LoraRequest(lora.name, lora.path, loaded.digest)))
        self._held[loaded.digest] = lora, loaded
        return loaded

    def remove(self, digest: bytes) -> None:
        """Free an adapter. Does nothing if the adapter is not in the store."""
        if self._held.pop(digest, None) is not None and self._forward is not None:
            self._forward.remove_adapter(digest)

    def detach(self) -> None:
        """Stop using the forward pass, until ``attach`` sets another forward pass."""
        self._forward = None


def _called(lora: LoraRequest) -> str:
    return f"adapter {lora.name!r}" if lora.name else "the adapter"


def _refused(lora: LoraRequest, error: Exception) -> RequestFailed:
    why = f"{_called(lora)} at {lora.path!r} cannot be served: {error}"
    return FailedPrecondition(why, field="lora", reason="LORA_REFUSED")


def _unavailable(lora: LoraRequest, error: Exception) -> RequestFailed:
    why = f"{_called(lora)} cannot be read from {lora.path!r}: {error}"
    return Unavailable(why, field="lora", reason="LORA_UNAVAILABLE")


# Reader of adapters that keeps only the worker's part of each adapter.


class Onlooker:
    """Observer that gets a model's modules while the model is loaded. A model may be loaded several times. The observer
    uses the latest notification.
    """

    def loaded(self, module: PreTrainedModel) -> None:
        """Receive the complete module, before it is split, cut or packed."""

    def split(self, features: Mapping[str, OwnFeatures]) -> None:
        """Receive the features of linear layers that this rank keeps, after tensor-parallel splitting."""

    def cut(self, module: PreTrainedModel) -> None:
        """Receive the module after layers of other pipeline stages were removed."""


class AdapterReader(Onlooker):
    """A ``ReadAdapter`` that reads a complete adapter and returns the worker's part, with the digest of the complete
    adapter.
    """

    def __init__(self, make: MakeReader, config: LoraConfig) -> None:
        self._make = make
        self._config = config
        self._read: ReadAdapter | None = None
        self._part = AdapterPart()

    def loaded(self, module: PreTrainedModel) -> None:
        """Create the reader for the complete model ``module``."""
        self._read, self._part = self._make(module, self._config), AdapterPart()

    def split(self, features: Mapping[str, OwnFeatures]) -> None:
        """Record which features of split layers this rank keeps."""
        self._part = AdapterPart(features, self._part.linears)

    def cut(self, module: PreTrainedModel) -> None:
        """Record which linear layers are left on this stage."""
        named: Any = module.named_modules()
        linears = frozenset(name for name, child in named if isinstance(child, torch.nn.Linear))
        self._part = AdapterPart(self._part.features, linears)

    def __call__(self, path: str) -> LoraAdapter:
        """Read the adapter in a directory. Raises LoraError, and RuntimeError if no model was loaded."""
        if self._read is None:
            raise RuntimeError("an adapter was read before a model was loaded")
        return self._part.of(self._read(path))


# Loads of adapters, in the engine: the engine waits for the answers of the workers.


class LoadsAwaited:
    """Collects the workers' answers to load commands. Thread-safe."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._lock = threading.Lock()
        self._last = 0
        self._waiting: dict[int, tuple[Future[LoadedLora], dict[int, LoadedLora | Exception]]] = {}
        self._failed: Exception | None = None

    def begin(self) -> "tuple[int, Future[LoadedLora]]":
        """Start a load. Returns its number and its future.

        The future's result has the modules of all workers, and the largest number of bytes on a worker. If workers
        failed, the future fails with the error of the failed worker with the lowest rank. If other workers have loaded
        the adapter, the error is a PartlyLoadedError.
        """
        with self._lock:
            self._last += 1
            future: Future[LoadedLora] = Future()
            if self._failed is not None:
                future.set_exception(self._failed)
            else:
                self._waiting[self._last] = future, {}
            return self._last, future

    def answered(self, rank: int, number: int, outcome: LoadedLora | Exception) -> None:
        """Record a worker's answer. Unknown numbers are ignored."""
        with self._lock:
            if number not in self._waiting:
                return
            future, outcomes = self._waiting[number]
            outcomes[rank] = outcome
            if len(outcomes) < self._num_workers:
                return
            del self._waiting[number]
        by_rank = [outcomes[rank] for rank in sorted(outcomes)]
        error = next((outcome for outcome in by_rank if isinstance(outcome, Exception)), None)
        loaded = [outcome for outcome in by_rank if isinstance(outcome, LoadedLora)]
        if error is None and any(each.digest != loaded[0].digest for each in loaded):
            digests = ", ".join(each.digest.hex() for each in loaded)
            error = FailedPrecondition(
                f"workers read different adapters: {digests}", field="lora", reason="LORA_CHANGED"
            )
        if error is None:
            future.set_result(
                LoadedLora(
                    digest=loaded[0].digest,
                    max_rank=max(each.max_rank for each in loaded),
                    modules=tuple(sorted({name for each in loaded for name in each.modules})),
                    num_bytes=max(each.num_bytes for each in loaded),
                )
            )
        elif loaded:
            future.set_exception(PartlyLoadedError(error, frozenset(each.digest for each in loaded)))
        else:
            future.set_exception(error)

    def refused(self, number: int, error: Exception) -> None:
        """Fail a load whose command was not sent. Unknown numbers are ignored."""
        with self._lock:
            future, _ = self._waiting.pop(number, (None, {}))
        if future is not None:
            future.set_exception(error)

    def fail(self, error: Exception) -> None:
        """Fail all current and future loads with ``error``, because the workers will send no more answers."""
        with self._lock:
            self._failed = self._failed or error
            waiting = [future for future, _ in self._waiting.values()]
            self._waiting.clear()
        for future in waiting:
            future.set_exception(error)


# Loads of adapters, in a worker: a thread reads the adapters.


class LoadsUnderWay:
    """Reads adapters in order, on a separate thread. Only the worker's thread may call the methods."""

    LOOK = 0.005
    """Time between two checks whether loads have ended, in seconds."""

    def __init__(self) -> None:
        self._thread: DeviceThread | None = None
        self._reading: deque[tuple[LoadLora, Future[ReadyLora]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._reading)

    def begin(self, load: LoadLora, store: LoraStore) -> None:
        """Start to read and prepare an adapter."""
        if self._thread is None:
            self._thread = DeviceThread("lora loader")
        self._reading.append((load, self._thread.submit(partial(_load, store, load.lora))))

    def take(self, store: LoraStore) -> Iterator[Loaded]:
        """Add the adapters that have been read, between steps. Yields the answers to the load commands."""
        while self._reading and self._reading[0][1].done():
            load, future = self._reading.popleft()
            try:
                yield Loaded(load.number, store.add(future.result()))
            except Exception as e:
                yield Loaded(load.number, Failure.of(e))


def _load(store: LoraStore, lora: LoraRequest) -> ReadyLora:
    return store.prepare(lora, store.read(lora))
