"""Adapters that the engine waits for while its workers read them."""

import threading
from concurrent.futures import Future

from penstock_common.errors import FailedPrecondition
from penstock_enginecore.lora.core.request import LoadedLora, PartlyLoadedError


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
