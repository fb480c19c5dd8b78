"""The main loop of an engine process.

One thread runs ``BusyLoop.run``. Each iteration handles the messages in the input queue, checks the progress of a
requested shutdown, and runs a step. The loop blocks while there is nothing to do. Other threads use only the methods
under the comment "From any thread". The loop sends results through an ``OutputSink``.
"""

import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from penstock_common.errors import Internal, RequestFailed, Unavailable
from penstock_common.observability.logging import incident
from penstock_common.types.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    RequestError,
    SchedulerStats,
    UtilityOutput,
)
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.queues import (
    AbortRequests,
    AddRequest,
    ClientGone,
    ExecutorFailed,
    FollowCache,
    GroupChanged,
    HandOver,
    InputMessage,
    InputQueues,
    OutputSink,
    UtilityCall,
    UtilityDone,
    Wakeup,
)
from penstock_enginecore.core.request import Request, log_aborted, refusal
from penstock_enginecore.core.scheduler.base import Clock
from penstock_enginecore.core.shutdown import ShutdownEffect, ShutdownPhase
from penstock_enginecore.core.steps_in_flight import EngineDeadError
from penstock_enginecore.core.utility import UtilityRegistry
from penstock_enginecore.data_parallel.core.driver import GroupDriver
from penstock_enginecore.data_parallel.core.group_channels import GroupEvent

logger = logging.getLogger(__name__)


class UtilityAnswers:
    """Calls the methods that clients can call by name, on the busy loop's thread. ``send`` sends the answer to a
    client.
    """

    def __init__(
        self, utilities: UtilityRegistry, queues: InputQueues, send: Callable[[str, UtilityOutput], None]
    ) -> None:
        self._utilities = utilities
        self._queues = queues
        self._send = send

    def answer(self, call: UtilityCall) -> None:
        """Call the utility method and send its result to the client. If the method returns a Future, send the outcome
        once the Future is done.
        """
        try:
            result = self._utilities.call(call.method, call.arguments)
        except EngineDeadError:  # The utility method processed step results and found that the engine is dead.
            raise
        except Exception as e:
            self._send_failure(call, e)
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda outcome: self._queues.put(UtilityDone(call, outcome)))
        else:
            self._send_result(call, result)

    def send_outcome(self, call: UtilityCall, future: "Future[Any]") -> None:
        """Send the client the result of a Future that is done."""
        if (error := future.exception()) is not None:
            self._send_failure(call, error)
        else:
            self._send_result(call, future.result())

    def _send_result(self, call: UtilityCall, result: Any) -> None:
        try:
            encoded = msgspec.msgpack.encode(result)
        except Exception as e:  # A plugin's method returned a value that msgpack cannot encode.
            self._send_failure(call, e)
        else:
            self._send(call.client_id, UtilityOutput(call_id=call.call_id, result=encoded))

    def _send_failure(self, call: UtilityCall, error: BaseException) -> None:
        if not isinstance(error, RequestFailed):
            logger.error("a call of one of this engine's utility methods failed method=%s", call.method, exc_info=error)
            error = Internal(f"{call.method} failed: {''.join(traceback.format_exception_only(error)).strip()}")
        answer = UtilityOutput(call_id=call.call_id, error=RequestError.from_exception(error))
        self._send(call.client_id, answer)


class BusyLoop:
    """Runs the steps of an ``EngineCore``. Between steps, the loop calls the methods of ``control``, such as pause and
    sleep.

    The health of the engine is judged by its progress. While ``has_work`` is true, each step must advance
    ``last_step_time``. If ``last_step_time`` does not advance for ``wedged_after`` seconds, the engine is wedged.
    ``last_step_time`` is in monotonic seconds. The loop also sets ``last_step_time`` when work arrives at an idle
    engine.

    ``group`` is set for an engine in a data-parallel group. All ranks of the group run the same steps together. A rank
    that waits for other ranks counts as idle.
    """

    def __init__(
        self,
        engine: EngineCore,
        control: EngineControl,
        sink: OutputSink,
        *,
        group: GroupDriver | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._engine = engine
        self._control = control
        self._sink = sink
        self._clock = clock
        self._queues = engine.queues
        self._utilities = UtilityAnswers(control.utilities, self._queues, self._send_answer)
        self._shutdown = control.shutdown
        self._idle = True
        self._cache_followers: frozenset[str] = frozenset()
        self._leases_ended = False
        """Whether leases on KV blocks have ended since the loop last sent the engine's load to frontends."""
        self._lora_changes = 0
        """Number of changes of adapters when the loop last became idle."""
        self.last_step_time = clock()
        engine.executor.watch(lambda error: self._queues.put(ExecutorFailed(error)))
        self._group = group

    # From any thread.

    def add(self, client_id: str, request: EngineCoreRequest) -> None:
        """Validate and queue a request. A refused request ends with an ERROR output; no exception is raised."""
        try:
            prepared = self._engine.preprocess(client_id, request)
        except Exception as e:
            failed = refusal(request.request_id, request.context.external_request_id, e, doing="validating the request")
            self._refuse(client_id, request.request_id, request.attempt, len(request.prior_output_token_ids), failed)
            if self._group is not None:
                self._group.refused(request.group_epoch, request.current_wave)
        else:
            self._queues.put(AddRequest(prepared))

    def group_changed(self, event: GroupEvent) -> None:
        """Queue an event of the engine's data-parallel group."""
        self._queues.group_changed(event)

    def abort(self, client_id: str, request_ids: list[str], reason: str = "") -> None:
        """End requests of a client as soon as possible. Unknown ids are ignored. The log shows ``reason``."""
        self._queues.put_abort(AbortRequests(client_id, list(request_ids), reason))

    def hand_over(self, client_id: str, request_ids: list[str]) -> None:
        """End requests of a client with finish reason HANDOFF, so that the frontend resumes the requests on another
        engine. Unknown ids are ignored.
        """
        self._queues.put(HandOver(client_id, request_ids))

    def call_utility(self, client_id: str, call_id: int, method: str, arguments: bytes) -> None:
        """Queue a call of a registered utility method. The loop calls the method between steps and sends the answer to
        the client as ``utility_output``.
        """
        self._queues.put(UtilityCall(client_id, call_id, method, arguments))

    def follow_cache(self, client_id: str) -> None:
        """Send every later change of the prefix cache to a client. The utility method ``cached_blocks`` returns the
        blocks that are cached now.
        """
        self._queues.put(FollowCache(client_id))

    def client_gone(self, client_id: str) -> None:
        """Record that a client's session has ended. The loop then ends the client's requests."""
        self._queues.put(ClientGone(client_id))

    def request_shutdown(self, timeout: float | None = None) -> None:
        """Ask the loop to finish the running requests and return, within ``timeout`` seconds if given. Signal handlers
        may call this.
        """
        self._shutdown.request(timeout)
        self._queues.wake()

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def seconds_since_last_step(self) -> float:
        """Return the seconds since the last step, or 0 while the engine is idle. The result keeps growing while the
        engine is wedged.
        """
        return 0.0 if self._idle else self._clock() - self.last_step_time

    @property
    def wedged(self) -> bool:
        """Whether the engine has work but no step has ended for ``wedged_after`` seconds. Health checks use only this
        property.
        """
        return self.seconds_since_last_step() >= self._engine.config.wedged_after

    def stats(self) -> SchedulerStats:
        """Return the engine's current load, and whether its steps make progress."""
        return msgspec.structs.replace(
            self._engine.scheduler.stats(),
            seconds_since_last_step=self.seconds_since_last_step(),
            wedged=self.wedged,
        )

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the engine is draining."""
        return self._shutdown.refuses_requests

    # Methods of the loop's own thread.

    def run(self) -> None:
        """Handle messages and run steps until a requested shutdown is complete.

        An error that affects more than one request is fatal. The loop then reports the error to every client and raises
        it.
        """
        gc.collect()
        gc.freeze()  # Objects from start-up live as long as the process, so exclude them from garbage collection.
        try:
            while self._shutdown.phase is not ShutdownPhase.EXIT:
                self._receive()
                self._advance_shutdown()
                self._step()
            self._refuse_the_rest()
        except Exception as e:
            self._sink.engine_dead(f"{type(e).__name__}: {e}")
            raise

    def _receive(self) -> None:
        """Handle all messages in the input queue. If the engine has nothing to do, wait for a message."""
        idle = not self._may_step
        block = idle and (self._engine.has_requests or bool(self._engine.leases) or not self._shutdown.leaves)
        self._idle = block
        # Leases on KV blocks can end, and adapters can be loaded and freed, while no step runs. Send the engine's new load
        # to frontends here.
        if block and (self._leases_ended or self._lora_changes != self._engine.loras.num_changes):
            self._leases_ended, self._lora_changes = False, self._engine.loras.num_changes
            self._sink.broadcast(EngineCoreOutputs(scheduler_stats=self.stats(), timestamp=self._clock()))
        message = self._queues.get(block=block, timeout=self._time_to_next_event())
        if block:
            self.last_step_time = self._clock()
            self._idle = False
            self._engine.log_steps()
        while message is not None:
            self._handle(message)
            message = self._queues.get(block=False, timeout=None)
        self._drain_aborts()
        if self._group is not None:
            # Handle LoRA adapters that have finished loading, because no step handles them while the ranks are idle.
            self._engine.loras.take()
            self._group.look()

    @property
    def _may_step(self) -> bool:
        """Whether the loop should start a step now."""
        if self._group is not None:
            return self._group.wants_step
        return self._engine.has_work and not self._engine.stalled

    def _time_to_next_event(self) -> float | None:
        """Return the seconds until a request or the shutdown reaches its deadline, or a log line is due. None if
        nothing is due.
        """
        times = [self._engine.time_to_next_deadline(), self._engine.seconds_to_log_line]
        if self._group is not None:
            times.append(self._group.seconds_to_repeat)
        if self._shutdown.deadline is not None:
            times.append(self._shutdown.deadline - self._clock())
        known = [max(seconds, 0.0) for seconds in times if seconds is not None]
        return min(known, default=None)

    def _handle(self, message: InputMessage) -> None:
        match message:
            case AddRequest(request):
                self._add(request)
            case AbortRequests():
                self._abort(message)
                message.request_ids.clear()
            case HandOver(client_id, request_ids):
                give = partial(self._engine.scheduler.abort_requests, client_id, request_ids, hand_over=True)
                _attempt(give, doing="handing over requests to another engine", requests=request_ids)
            case UtilityCall():
                self._utilities.answer(message)
            case UtilityDone(call, outcome):
                self._utilities.send_outcome(call, outcome)
            case FollowCache(client_id):
                self._tell_of_cache(self._cache_followers | {client_id})
            case ClientGone(client_id):
                self._tell_of_cache(self._cache_followers - {client_id})
                gone = partial(self._engine.scheduler.abort_client, client_id)
                _attempt(gone, doing=f"ending the requests of the disconnected frontend {client_id}")
            case ExecutorFailed(error):
                raise EngineDeadError(f"the executor failed: {error}") from error
            case GroupChanged(event):
                if self._group is not None:
                    self._group.take(event)
            case Wakeup():
                pass

    def _advance_shutdown(self) -> None:
        self._leases_ended |= self._engine.leases.expire() > 0
        engine, now = self._engine, self._clock()
        for effect in self._shutdown.advance(now, has_requests=engine.has_requests, has_leases=bool(engine.leases)):
            match effect:
                case ShutdownEffect.ANNOUNCE_DRAINING:
                    self._sink.draining(self._shutdown.timeout)
                    # Frozen requests make no progress, so they would only delay the shutdown until its deadline.
                    if self._engine.paused:
                        self._abort_all()
                case ShutdownEffect.ABORT_REQUESTS:
                    logger.info("the engine shuts down: %s", effect.value)
                    self._abort_all()
                    engine.leases.revoke_all()

    def _abort_all(self) -> None:
        failure = Unavailable("the engine is draining and ended the request", reason="DRAINING")
        self._engine.scheduler.abort_all(RequestError.from_exception(failure))

    def _step(self) -> None:
        step = self._engine.step if self._group is None else self._group.step
        if self._engine.has_work if self._group is None else self._group.wants_step:
            self._emit(step(self._drain_aborts))
            self._control.after_step()
            self.last_step_time = self._clock()
        elif self._group is not None:
            self._emit(self._engine.scheduler.take_outputs())
        if events := self._engine.scheduler.kv_cache.take_events():
            to = None if self._engine.config.cache.enable_kv_events else self._cache_followers
            self._sink.broadcast(EngineCoreOutputs(kv_events=events, timestamp=self._clock()), to)

    def _tell_of_cache(self, followers: frozenset[str]) -> None:
        """Set the clients to which the loop sends changes of the prefix cache."""
        if bool(followers) != bool(self._cache_followers):
            self._engine.scheduler.kv_cache.record_events(bool(followers))
        self._cache_followers = followers

    def _emit(self, frames: dict[str, EngineCoreOutputs]) -> None:
        for client_id, outputs in frames.items():
            self._sink.emit(client_id, outputs)

    def _drain_aborts(self) -> None:
        while (abort := self._queues.get_abort()) is not None:
            self._abort(abort)

    def _abort(self, message: AbortRequests) -> None:
        scheduler = self._engine.scheduler

        def abort() -> None:
            log_aborted(scheduler.abort_requests(message.client_id, message.request_ids), message.reason)

        _attempt(abort, doing="aborting requests", requests=message.request_ids)

    def _add(self, request: Request) -> None:
        try:
            if self._shutdown.refuses_requests:
                raise Unavailable("the engine is draining and takes no new requests", reason="DRAINING")
            self._engine.add(request)
            if self._group is not None:
                self._group.added(*request.wave)
        except Exception as e:
            failed = refusal(request.request_id, request.context.external_request_id, e, doing="queueing the request")
            if not self._engine.scheduler.fail(request, RequestError.from_exception(failed)):
                self._refuse(request.client_id, request.request_id, request.attempt, request.num_output_tokens, failed)
            if self._group is not None:
                self._group.added(*request.wave, refused=True)

    def _refuse(self, client_id: str, request_id: str, attempt: int, offset: int, error: RequestFailed) -> None:
        output = EngineCoreOutput(
            request_id=request_id,
            attempt=attempt,
            offset=offset,
            finish_reason=FinishReason.ERROR,
            error=RequestError.from_exception(error),
        )
        frame = EngineCoreOutputs(outputs=[output], timestamp=self._clock(), finished_requests=[request_id])
        self._sink.emit(client_id, frame)

    def _send_answer(self, client_id: str, answer: UtilityOutput) -> None:
        """Send pending outputs, then the answer to a utility call. Outputs may be pending because the call has ended
        requests.
        """
        self._emit(self._engine.scheduler.take_outputs())
        self._sink.emit(client_id, EngineCoreOutputs(utility_output=answer, timestamp=self._clock()))

    def _refuse_the_rest(self) -> None:
        """Handle the messages that arrived after the last request had ended. Requests in these messages are refused."""
        while (message := self._queues.get(block=False, timeout=None)) is not None:
            self._handle(message)


def _attempt(act: Callable[[], object], *, doing: str, requests: Sequence[str] = ()) -> None:
    """Call ``act``. If ``act`` raises an exception, log the exception as an incident."""
    try:
        act()
    except Exception as e:
        incident(e, request=" ".join(requests), doing=doing)
