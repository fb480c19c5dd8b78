"""An engine on a thread of this process, as the frontend's code sees engines."""

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
    """The ``EngineView`` of one engine, whose ``usable`` says whether it takes requests. May be read from any thread."""

    def __init__(self, busy_loop: BusyLoop, ready: EngineReady, usable: Callable[[], bool]) -> None:
        self._busy_loop = busy_loop
        self._ready = ready
        self._usable = usable

    @property
    def limits(self) -> ModelLimits:
        """What the engine can take."""
        return ModelLimits(self._ready.max_model_len, self._ready.vocab_size, self._ready.hidden_size)

    @property
    def capabilities(self) -> Sequence[str]:
        """What the engine serves."""
        return self._ready.capabilities

    def serving(self, capability: str) -> Sequence[str]:
        """The engine's id, if it serves that."""
        return [self._ready.engine_id] if capability in self._ready.capabilities else []

    @property
    def num_engines(self) -> int:
        """1 while the engine takes requests, else 0."""
        return int(self._usable())

    def cluster(self) -> Sequence[EngineStatus]:
        """The engine, which has no address."""
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
        """The engine's own: there is nothing that it differs from."""
        return [Variant(config_hash=self._ready.config_hash, engine_ids=(self._ready.engine_id,), differs={})]

    def groups(self) -> Sequence[PoolGroup]:
        """It computes alone."""
        return ()

    def rank_loads(self) -> Sequence[RankLoad]:
        """The engine's load, as rank 0."""
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
    """The ``EngineClient`` of one engine in this process, and the ``OutputSink`` of its busy loop.

    Methods belong to the event loop's thread, except those of the sink. ``num_tokens`` counts the new tokens of all
    requests, for the eye.
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
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the busy loop, wait for it and release the device. From any thread but its own. Idempotent."""
        self._busy_loop.request_shutdown()
        self._thread.join()
        self._engine.shutdown()

    # As the EngineClient.

    @property
    def usable(self) -> bool:
        """Whether the engine takes requests: it has not died, and nobody has told it to ``refuse`` them."""
        return self._dead is None and not self._closed

    async def wait_until_usable(self, deadline: float | None = None, *, tenant: str = "") -> ModelLimits:  # noqa: ARG002 - nothing waits
        """What the engine can take: it is usable at once, or never again. Raises Unavailable and, at the ``deadline`` (Unix
        seconds), DeadlineExceeded; what the engine died of when it did.
        """
        self._check()
        if deadline is not None and deadline <= time.time():
            raise DeadlineExceeded("the deadline has passed")
        return self.view.limits

    def add(self, *requests: EngineCoreRequest) -> None:
        """Start requests. Raises as ``wait_until_usable`` does."""
        self._check()
        for request in requests:
            self._busy_loop.add(_CLIENT, request)

    def abort(self, request_ids: Iterable[str], reason: str) -> None:
        """End those of the requests that have not ended; nothing more comes of them."""
        self._busy_loop.abort(_CLIENT, list(request_ids), reason)

    async def call_utility(self, method: str, arguments: Sequence[object] = (), *, engine: str = "") -> dict[str, Any]:
        """Call a registered method of the engine, if its id is ``engine`` or that is empty. Returns by its id what it answered,
        or the RequestFailed that the call ended with.
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
        """Take no more requests."""
        self._closed = True

    # As the OutputSink.

    def emit(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        """Hand a step's outputs to the event loop: one call per step."""
        del client_id
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def broadcast(self, outputs: EngineCoreOutputs, to: Collection[str] | None = None) -> None:
        """Cache events go to nobody: nothing here follows the cache."""

    def draining(self, timeout: float) -> None:
        """Nobody need be told: whoever stops this engine knows."""

    def engine_dead(self, reason: str) -> None:
        """End every request and call: the busy loop has failed."""
        self._loop.call_soon_threadsafe(self._die, reason)

    # Inside.

    def _run(self) -> None:
        """The engine's thread. What kills the loop has been told to ``engine_dead``, and fails every call."""
        try:
            self._busy_loop.run()
        except Exception as e:
            logger.error("the engine died", exc_info=e)

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
        if answer is None or answer.done():  # its caller has gone
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
