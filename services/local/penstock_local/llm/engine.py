"""Engine on a thread of this process, with the interfaces that the frontend's code uses for remote engines."""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from penstock_common.errors import DeadlineExceeded, Internal, RequestFailed, Unavailable
from penstock_common.types.cluster import EngineState, EngineStatus
from penstock_common.types.data_parallel import PoolGroup
from penstock_common.types.outputs import EngineCoreOutputs, EngineReady, UtilityOutput
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_frontend.interfaces import ModelLimits, OutputHandler, RankLoad, Variant


class InProcessView:
    """``EngineView`` of one engine. ``usable`` returns whether the engine accepts requests. Thread-safe."""

    def __init__(self, busy_loop: BusyLoop, ready: EngineReady, usable: Callable[[], bool]) -> None:
        self._busy_loop = busy_loop
        self._ready = ready
        self._usable = usable

    @property
    def limits(self) -> ModelLimits:
        """Limits of the model on this engine."""
        ready = self._ready
        return ModelLimits(ready.max_model_len, ready.vocab_size, ready.hidden_size, media=tuple(ready.media))

    @property
    def capabilities(self) -> Sequence[str]:
        """Capabilities that the engine serves."""
        return self._ready.capabilities

    def serving(self, capability: str) -> Sequence[str]:
        """Return the engine's id in a list if it serves the capability, else an empty list."""
        return [self._ready.engine_id] if capability in self._ready.capabilities else []

    @property
    def num_engines(self) -> int:
        """Number of usable engines: 1 or 0."""
        return int(self._usable())

    def cluster(self) -> Sequence[EngineStatus]:
        """Return the status of the engine. Its address is empty."""
        stats = self._busy_loop.stats()
        return [
            EngineStatus(
                engine_id=self._ready.engine_id,
                incarnation=self._ready.incarnation,
                address="",
                state=EngineState.SERVING if self._usable() else EngineState.DEAD,
                num_waiting_reqs=stats.num_waiting_reqs,
                num_running_reqs=stats.num_running_reqs,
                kv_cache_usage=stats.kv_cache_usage,
                seconds_since_last_step=self._busy_loop.seconds_since_last_step(),
                model=self._ready.model,
            )
        ]

    def variants(self) -> Sequence[Variant]:
        """Return the only variant, that of this engine."""
        return [Variant(config_hash=self._ready.config_hash, engine_ids=(self._ready.engine_id,), differs={})]

    def groups(self) -> Sequence[PoolGroup]:
        """Return no groups: the engine is not part of a data-parallel group."""
        return ()

    def rank_loads(self) -> Sequence[RankLoad]:
        """Return the engine's load, as rank 0."""
        stats, ready = self._busy_loop.stats(), self._ready
        return [
            RankLoad(
                rank=0,
                num_running_reqs=stats.num_running_reqs,
                num_waiting_reqs=stats.num_waiting_reqs,
                kv_cache_usage=stats.kv_cache_usage,
                capacity=ready.num_kv_blocks * ready.block_size,
                max_running=ready.max_num_seqs,
                cache_hit_rate=stats.prefix_cache_hit_rate,
            )
        ]


logger = logging.getLogger(__name__)

_CLIENT = "in-process"


class InProcessEngine:
    """``EngineClient`` of one engine in this process, and ``OutputSink`` of its busy loop.

    Methods are called on the event loop's thread, except the methods of the sink. ``num_tokens`` counts the new tokens
    of all requests, for progress bars.
    """

    def __init__(
        self, engine: EngineCore, ready: EngineReady, outputs: OutputHandler, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.num_tokens = 0
        self._engine = engine
        self._ready = ready
        self._outputs = outputs
        self._loop = loop
        self._dead: RequestFailed | None = None
        self._closed = False
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._busy_loop = BusyLoop(engine, EngineControl(engine), self)
        self.view = InProcessView(self._busy_loop, ready, lambda: self.usable)
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the busy loop, wait for it, and release the device.

        Idempotent. Call it from any thread except the engine's.
        """
        self._busy_loop.request_shutdown()
        self._thread.join()
        self._engine.shutdown()

    # Methods of EngineClient.

    @property
    def usable(self) -> bool:
        """Whether the engine accepts requests: the engine has not died, and ``refuse`` was not called."""
        return self._dead is None and not self._closed

    async def wait_until_usable(self, deadline: float | None = None, *, tenant: str = "") -> ModelLimits:  # noqa: ARG002 - nothing waits
        """Return the engine's limits, without waiting: an engine that is not usable now will never be usable again.

        Raises:
            Unavailable: The LLM is closed.
            DeadlineExceeded: ``deadline`` (Unix seconds) has passed.
            RequestFailed: The engine has died.
        """
        self._check()
        if deadline is not None and deadline <= time.time():
            raise DeadlineExceeded("the deadline has passed")
        return self.view.limits

    def add(self, *requests: EngineCoreRequest) -> None:
        """Start requests. Raises the errors of ``wait_until_usable``."""
        self._check()
        for request in requests:
            self._busy_loop.add(_CLIENT, request)

    def abort(self, request_ids: Iterable[str], reason: str) -> None:
        """Abort the given requests that are still running. Aborted requests produce no more output."""
        self._busy_loop.abort(_CLIENT, list(request_ids), reason)

    async def call_utility(self, method: str, arguments: Sequence[object] = (), *, engine: str = "") -> dict[str, Any]:
        """Call a utility method of the engine, if ``engine`` is its id or empty.

        Returns the answer by engine id, or the RequestFailed of the call.
        """
        self._check()
        if engine not in ("", self._ready.engine_id):
            return {}
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = self._loop.create_future()
        self._busy_loop.call_utility(_CLIENT, call_id, method, msgspec.msgpack.encode(list(arguments)))
        try:
            return {self._ready.engine_id: await answer}
        except RequestFailed as e:
            return {self._ready.engine_id: e}
        finally:
            del self._calls[call_id]

    def refuse(self) -> None:
        """Refuse new requests from now on."""
        self._closed = True

    # Methods of OutputSink.

    def emit(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        """Pass a step's outputs to the event loop, with one call per step."""
        del client_id
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def broadcast(self, outputs: EngineCoreOutputs, to: Collection[str] | None = None) -> None:
        """Drop cache events, because no code in this process uses them."""

    def draining(self, timeout: float) -> None:
        """Do nothing: the caller that stops this engine needs no notification."""

    def engine_dead(self, reason: str) -> None:
        """Fail every request and call, because the busy loop has failed."""
        self._loop.call_soon_threadsafe(self._die, reason)

    # Internals.

    def _run(self) -> None:
        """Run the engine's thread.

        The busy loop reports its own failure through ``engine_dead``, which fails every call.
        """
        try:
            self._busy_loop.run()
        except Exception as e:
            logger.error("the engine stopped after an error", exc_info=e)

    def _check(self) -> None:
        if self._dead is not None:
            raise self._dead
        if self._closed:
            raise Unavailable("this LLM is closed", reason="CLOSED")

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        if outputs.utility_output is not None:
            self._answer(outputs.utility_output)
        if outputs.outputs:
            self.num_tokens += sum(len(output.new_token_ids) for output in outputs.outputs)
            not_needed = self._outputs.process(outputs.outputs, self._ready.engine_id, outputs.timestamp)
            if not_needed:
                self._busy_loop.abort(_CLIENT, list(not_needed))

    def _answer(self, output: UtilityOutput) -> None:
        answer = self._calls.get(output.call_id)
        if answer is None or answer.done():  # the caller no longer waits
            return
        if output.error is not None:
            answer.set_exception(output.error.to_exception())
        else:
            answer.set_result(msgspec.msgpack.decode(output.result))

    def _die(self, reason: str) -> None:
        self._dead = Internal(f"the engine died: {reason}", reason="ENGINE_DEAD")
        self._outputs.fail_all(self._dead)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(self._dead)
