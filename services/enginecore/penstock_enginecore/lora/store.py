"""The adapters that a worker holds, and how they are read for the model that it loads."""

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
"""Reads the adapter in a directory. Raises LoraError."""
MakeReader: TypeAlias = Callable[[PreTrainedModel, LoraConfig], ReadAdapter]
"""Makes what reads adapters of a model, whose modules are as they were loaded."""

SizeAdapter: TypeAlias = Callable[[str, LoraConfig], int]
"""Bytes that the matrices of the adapter in a directory will have in memory, without reading them. Raises LoraError."""

_UNREADABLE = (LoraReason.NOT_FOUND, LoraReason.UNREADABLE)


def peft_reader(module: PreTrainedModel, config: LoraConfig) -> ReadAdapter:
    """Reads adapters as PEFT saves them."""
    target, limits, before = AdapterTarget.of(module), LoraLimits(config.max_lora_rank), ReadBefore()
    return lambda path: read_adapter(path, target, limits, before)


def peft_size(path: str, config: LoraConfig) -> int:
    """Of adapters as PEFT saves them."""
    return adapter_bytes(path, LoraLimits(config.max_lora_rank))


@contextmanager
def telling_of(lora: LoraRequest) -> Iterator[None]:
    """What is wrong with the files of an adapter ends its requests: raises Unavailable where they cannot be read,
    FailedPrecondition for what is not served.
    """
    try:
        yield
    except LoraError as e:
        raise (_unavailable if e.reason in _UNREADABLE else _refused)(lora, e) from e
    except OSError as e:
        raise _unavailable(lora, e) from e


class ReadyLora(NamedTuple):
    """An adapter that was read for ``lora``. ``take``: how ``forward`` takes it; None where there was no forward pass."""

    lora: LoraRequest
    loaded: LoadedLora
    forward: AdaptedForward | None
    take: TakeAdapter | None


class LoraStore:
    """By digest, in the forward pass. ``read`` and ``prepare`` may be called on any thread while steps run; the other methods
    between steps.

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

    @property
    def digests(self) -> list[bytes]:
        """Of the adapters that are held."""
        return list(self._held)

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
        """Have what was read for ``lora`` as the forward pass wants it. Raises FailedPrecondition with what that finds wrong."""
        loaded = LoadedLora(adapter.digest, adapter.max_rank, tuple(sorted(adapter.updates)), adapter.num_bytes)
        forward = self._forward
        try:
            take = None if forward is None else forward.prepare_adapter(adapter)
        except ValueError as e:
            raise _refused(lora, e) from e
        return ReadyLora(lora, loaded, forward, take)

    def add(self, ready: ReadyLora) -> LoadedLora:
        """Hold it. While there is no forward pass, it is read again for the next, and so it is for one that came meanwhile:
        raises as ``read`` then.
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
        """Let go of an adapter; one that is not there is passed over."""
        if self._held.pop(digest, None) is not None and self._forward is not None:
            self._forward.remove_adapter(digest)

    def detach(self) -> None:
        """The forward pass is gone, until ``attach``."""
        self._forward = None


def _called(lora: LoraRequest) -> str:
    return f"adapter {lora.name!r}" if lora.name else "the adapter"


def _refused(lora: LoraRequest, error: Exception) -> RequestFailed:
    why = f"{_called(lora)} at {lora.path!r} is not served: {error}"
    return FailedPrecondition(why, field="lora", reason="LORA_REFUSED")


def _unavailable(lora: LoraRequest, error: Exception) -> RequestFailed:
    why = f"{_called(lora)} cannot be read from {lora.path!r}: {error}"
    return Unavailable(why, field="lora", reason="LORA_UNAVAILABLE")


# Reads adapters of the model that a worker loads, and keeps of them what the worker computes.


class Onlooker:
    """Is shown the modules of a model while it is loaded, maybe several times: what it was shown last counts."""

    def loaded(self, module: PreTrainedModel) -> None:
        """They are whole: neither split nor cut nor packed."""

    def split(self, features: Mapping[str, OwnFeatures]) -> None:
        """They were split; this rank has these features of linear layers."""

    def cut(self, module: PreTrainedModel) -> None:
        """The layers of other stages are gone."""


class AdapterReader(Onlooker):
    """A ``ReadAdapter``: of the whole adapter, of which the worker's part is given, under the whole's digest."""

    def __init__(self, make: MakeReader, config: LoraConfig) -> None:
        self._make = make
        self._config = config
        self._read: ReadAdapter | None = None
        self._part = AdapterPart()

    def loaded(self, module: PreTrainedModel) -> None:
        """Of this model."""
        self._read, self._part = self._make(module, self._config), AdapterPart()

    def split(self, features: Mapping[str, OwnFeatures]) -> None:
        """See ``OwnFeatures``."""
        self._part = AdapterPart(features, self._part.linears)

    def cut(self, module: PreTrainedModel) -> None:
        """Of the linear layers that are left."""
        named: Any = module.named_modules()
        linears = frozenset(name for name, child in named if isinstance(child, torch.nn.Linear))
        self._part = AdapterPart(self._part.features, linears)

    def __call__(self, path: str) -> LoraAdapter:
        """See ``ReadAdapter``. RuntimeError before a model was loaded."""
        if self._read is None:
            raise RuntimeError("a model must be loaded before its adapters are read")
        return self._part.of(self._read(path))


# Adapters that workers read while they compute, and that the engine waits for.


class LoadsAwaited:
    """Loads that workers have not all answered. From any thread."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._lock = threading.Lock()
        self._last = 0
        self._waiting: dict[int, tuple[Future[LoadedLora], dict[int, LoadedLora | Exception]]] = {}
        self._failed: Exception | None = None

    def begin(self) -> "tuple[int, Future[LoadedLora]]":
        """The next number, and what becomes of the load: what all workers have taken, or the error of the first that has one,
        as PartlyLoadedError where others have taken it. The modules are those of all workers, the bytes those of the worker
        that has the most.
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
        """A worker's answer. Numbers that are not waited for are ignored."""
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
        """A load was not begun. Numbers that are not waited for are ignored."""
        with self._lock:
            future, _ = self._waiting.pop(number, (None, {}))
        if future is not None:
            future.set_exception(error)

    def fail(self, error: Exception) -> None:
        """Nothing is answered any more: end every load, also those to come, with ``error``."""
        with self._lock:
            self._failed = self._failed or error
            waiting = [future for future, _ in self._waiting.values()]
            self._waiting.clear()
        for future in waiting:
            future.set_exception(error)


# At a worker.


class LoadsUnderWay:
    """Reads adapters on a thread of its own, in order. All methods belong to the worker's thread."""

    LOOK = 0.005
    """Seconds between two looks at what is being read."""

    def __init__(self) -> None:
        self._thread: DeviceThread | None = None
        self._reading: deque[tuple[LoadLora, Future[ReadyLora]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._reading)

    def begin(self, load: LoadLora, store: LoraStore) -> None:
        """Have an adapter read, and made ready for the forward pass."""
        if self._thread is None:
            self._thread = DeviceThread("lora loader")
        self._reading.append((load, self._thread.submit(partial(_load, store, load.lora))))

    def take(self, store: LoraStore) -> Iterator[Loaded]:
        """Take what has been read, between steps. The answers."""
        while self._reading and self._reading[0][1].done():
            load, future = self._reading.popleft()
            try:
                yield Loaded(load.number, store.add(future.result()))
            except Exception as e:
                yield Loaded(load.number, Failure.of(e))


def _load(store: LoraStore, lora: LoraRequest) -> ReadyLora:
    return store.prepare(lora, store.read(lora))
