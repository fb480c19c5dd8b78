"""Oracle engine: a FakeEngine with the oracle's outputs, which checks the prior tokens it gets and fails on demand."""

import asyncio
import os
import signal
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.common.v1 import finish_pb2, stats_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.rpc.outputs import columns_from_proto, fill_columns
from penstock_common.types.outputs import UINT32
from tests.fakes.engines.fake_engine import FakeEngine, FakeRequest, FakeSession, logprobs_of
from tests.fakes.engines.oracle_engine import outputs
from tests.fakes.engines.oracle_engine.knobs import Fault, Knobs, Point, changed

REMEMBERED = 500
"""Maximum number of requests that ``state`` reports."""
DRAINING = finish_pb2.RequestError(
    code="UNAVAILABLE", message="the engine is shutting down", reason="DRAINING", retry_after=1.0
)


class OracleEngine(FakeEngine):
    """Oracle engine. ``ended`` is set when the process must end: drained or dead. Wrong prior output is refused."""

    def __init__(
        self, engine_id: str, *, model: str, incarnation: str, max_model_len: int, drain_timeout: float
    ) -> None:
        super().__init__(
            engine_id,
            model=model,
            incarnation=incarnation,
            max_model_len=max_model_len,
            vocab_size=outputs.vocab_size(),
            manual=True,
            script=self._output_of,
        )
        self.eos_token_id = outputs.eos_token_id()
        self.knobs = Knobs()
        self.reached: list[str] = []
        """Points at which faults have happened since faults were last set, in order."""
        self.ended = asyncio.Event()
        self.on_draining: Callable[[float], None] = lambda time_left: None
        self._drain_timeout = drain_timeout
        self._drain_deadline: float | None = None
        self._held_back: list[tuple[FakeSession, pb.SessionResponse]] = []
        self._last_step = time.monotonic()
        self._stalled_until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._drain_deadline is not None

    def set(self, **changes: Any) -> None:
        """Set knobs."""
        before, self.knobs = self.knobs, changed(self.knobs, changes)
        self.tokens_per_step = self.knobs.tokens_per_step
        self.num_cached_tokens = self.knobs.num_cached_tokens
        if before.held and not self.knobs.held:
            self._last_step = time.monotonic()
        if before.packets == "held_back" != self.knobs.packets:
            self._send_held_back()
        if before.extra_waiting != self.knobs.extra_waiting:
            self.tell()
        if "faults" in changes:
            self.reached.clear()
        self._wake.set()

    def state(self) -> dict[str, Any]:
        """Return the state that tests read."""
        recent = self.requests[-REMEMBERED:]
        return {
            "incarnation": self.ready.incarnation,
            "running": {r.message.external_request_id: r.num_sent for r in self.running.values()},
            "num_running": len(self.running),
            "num_sessions": len(self.sessions),
            "attempts": [[m.external_request_id, m.attempt, len(m.prior_output_token_ids)] for m in recent],
            "times_left": [message.time_left for message in recent],
            "aborted": list(self.aborted),
            "reached": list(self.reached),
            "num_steps": self.num_steps,
            "num_held_back": len(self._held_back),
        }

    def request_drain(self) -> None:
        """Take no new requests. Requests left at the deadline end as ABORT. The process ends when no request is left."""
        if self._drain_deadline is None:
            self._drain_deadline = time.monotonic() + self._drain_timeout
            self.refusal = DRAINING
            self.drain(time_left=self._drain_timeout)
            self.on_draining(self._drain_timeout)
            self._reached("draining")
            self._spawn(self.refuse_by_health())
            self._spawn(self._end_drained())

    def seconds_since_last_step(self) -> float:
        """Return the age of the last step in seconds, or 0 if the engine has no work or a test holds it."""
        if self.knobs.step_age >= 0:
            return self.knobs.step_age
        return time.monotonic() - self._last_step if self.running and not self.knobs.held else 0.0

    async def run(self) -> None:
        """Run steps until the process must end."""
        while not self.ended.is_set():
            self._end_expired()
            if not self.running or self._pausing():
                if not self.running:
                    self._last_step = time.monotonic()
                self._wake.clear()
                await self._woken_within(0.02 if self.running else None)
                continue
            requests = list(self.running.values())
            for request in requests:
                self._reached("in_step", request)
            self.step()
            self._last_step = time.monotonic()
            if self.knobs.faults:
                await self.handed_over()
                for request in requests:
                    for point in self._points(request):
                        self._reached(point, request)
            await asyncio.sleep(self.knobs.step_seconds)

    async def GetEngineInfo(self, request: pb.GetEngineInfoRequest, context: Any) -> pb.GetEngineInfoResponse:
        answer = await super().GetEngineInfo(request, context)
        answer.scheduler_stats.CopyFrom(self.stats())
        return answer

    def stats(self) -> stats_pb2.SchedulerStats:
        """Return the load that the engine reports, and whether it is wedged."""
        stats, age = self._stats(), self.seconds_since_last_step()
        stats.seconds_since_last_step, stats.wedged = age, age >= self.knobs.wedged_after
        return stats

    def _stats(self) -> stats_pb2.SchedulerStats:
        stats = super()._stats()
        stats.num_waiting_reqs += self.knobs.extra_waiting
        return stats

    def _greet(self, session: FakeSession) -> None:
        super()._greet(session)
        session.send(outputs=pb.EngineCoreOutputs(scheduler_stats=self._stats()))
        if self.draining:
            session.send(draining=pb.Draining(time_left=self._drain_timeout))

    def _output_of(self, message: pb.EngineCoreRequest) -> Sequence[int] | None:
        """Return the complete output, up to the maximum length that a request can ask for."""
        params = message.sampling_params
        room = self.ready.max_model_len - len(message.prompt_token_ids)
        try:
            return outputs.output(params, min(params.max_tokens, room) if params.HasField("max_tokens") else room)
        except ValueError:
            return None

    def _add(self, message: pb.EngineCoreRequest, session: FakeSession) -> None:
        if (problem := self._problem(message, session)) is None:
            super()._add(message, session)
        else:
            self.requests.append(message)
            error = finish_pb2.RequestError(code="INVALID_ARGUMENT", message=problem, reason="ORACLE")
            self._refuse(FakeRequest(message, session, None), error)

    def _problem(self, message: pb.EngineCoreRequest, session: FakeSession) -> str | None:
        """Return a violation of the contract by the request's frontend, or an empty text."""
        script = self._output_of(message)
        if script is None:
            return "the constraint is none of an oracle's"
        if (session, message.request_id) in self.running:
            return f"request {message.request_id} attempt {message.attempt} was sent while another attempt runs"
        prior = list(message.prior_output_token_ids)
        if prior and not message.attempt:
            return f"a first attempt has {len(prior)} prior_output_token_ids"
        if prior != script[: len(prior)]:
            return f"prior_output_token_ids are {prior}; the oracle's output is {script}"
        return None

    def _deliver(self, session: FakeSession, of_session: Sequence[pb.EngineCoreOutput]) -> None:
        if self.knobs.packets == "with_gap":
            for output in of_session:
                _lose_first(output)
        elif self.knobs.packets == "again":
            of_session = [self._with_token_before(output) for output in of_session]
        frame = pb.SessionResponse(outputs=self._frame(session, of_session))
        if self.knobs.packets == "held_back":
            self._held_back.append((session, frame))
            return
        session.queue.put_nowait(frame)
        if self.knobs.packets == "twice":
            session.queue.put_nowait(frame)

    def _send_held_back(self) -> None:
        """Send the held-back outputs over every session, including newer ones. Engines must not do that, but frontends
        must tolerate it.

        Outputs of ended sessions get other tokens, like the tokens of a request without a seed.
        """
        held_back, self._held_back = self._held_back, []
        for owner, frame in held_back:
            if owner not in self.sessions:
                _spoil(frame)
            for session in self.sessions:
                session.queue.put_nowait(frame)

    def _with_token_before(self, output: pb.EngineCoreOutput) -> pb.EngineCoreOutput:
        message = next(m for m in reversed(self.requests) if m.request_id == output.request_id)
        if output.offset <= len(message.prior_output_token_ids):
            return output
        again = pb.EngineCoreOutput()
        again.CopyFrom(output)
        again.offset -= 1
        tokens = [*outputs.output(message.sampling_params, output.offset)[-1:], *output.new_token_ids]
        again.new_token_ids[:] = tokens
        if output.HasField("new_logprobs"):
            again.new_logprobs.CopyFrom(logprobs_of(tokens, message.sampling_params.logprobs))
        return again

    def _points(self, request: FakeRequest) -> Iterator[Point]:
        """Yield the points that a request has reached in the step that has just ended."""
        if request.num_sent <= len(request.message.prior_output_token_ids) + self.tokens_per_step:
            yield "after_first_token"
        yield "mid_stream"
        if request.key not in self.running:
            yield "after_last_sent"
        elif request.num_sent + self.tokens_per_step >= request.limit(self.ready.max_model_len):
            yield "before_last"

    def _reached(self, point: str, request: FakeRequest | None = None) -> None:
        for fault in list(self.knobs.faults):
            if fault.at == point and self._counts(fault, request):
                self.knobs.faults.remove(fault)
                self.reached.append(point)
                self._act(fault)
                self._notify()

    def _counts(self, fault: Fault, request: FakeRequest | None) -> bool:
        """Return whether a fault must happen now."""
        if request is None:
            return True
        if fault.salt and request.message.cache_salt != fault.salt:
            return False
        if fault.at == "on_add":
            running = [r for r in self.running.values() if fault.salt in ("", r.message.cache_salt)]
            return len(running) >= fault.count
        if fault.at == "in_step":
            return request.num_sent + self.tokens_per_step >= fault.count
        return fault.at != "mid_stream" or request.num_sent >= fault.count

    def _act(self, fault: Fault) -> None:
        match fault.action:
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hold":
                self.knobs.held = True
            case "close":
                self.close_streams()
            case "break":
                self.break_streams()
            case "dead":
                self.fail("a fault was asked for")
            case "stall":
                self._stalled_until = time.monotonic() + fault.seconds
            case "freeze":
                time.sleep(fault.seconds)
            case "drain":
                self.request_drain()

    def fail(self, reason: str) -> None:
        """Send engine_dead and end the process."""
        self.die(reason)
        self.running.clear()
        self._spawn(self._end())

    def _pausing(self) -> bool:
        return self.knobs.held or self.knobs.stalled or time.monotonic() < self._stalled_until

    def _end_expired(self) -> None:
        now = time.time()
        for request in list(self.running.values()):
            if request.message.HasField("deadline") and request.message.deadline <= now:
                error = finish_pb2.RequestError(
                    code="DEADLINE_EXCEEDED",
                    message="the deadline passed",
                    field="deadline",
                    reason="DEADLINE_EXCEEDED",
                )
                self._send(request, pb.EngineCoreOutput(finish_reason=finish_pb2.FINISH_REASON_ABORT, error=error))

    async def _end_drained(self) -> None:
        assert self._drain_deadline is not None
        while self.running and time.monotonic() < self._drain_deadline:
            await asyncio.sleep(0.005)
        for request in list(self.running.values()):
            self._send(request, pb.EngineCoreOutput(finish_reason=finish_pb2.FINISH_REASON_ABORT, error=DRAINING))
        await self._end()

    async def _end(self) -> None:
        await self.handed_over()
        self.close_streams()
        self.ended.set()
        self._wake.set()

    async def _woken_within(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _spoil(frame: pb.SessionResponse) -> None:
    """Change all tokens of a frame."""
    if frame.outputs.HasField("token_columns"):
        columns = columns_from_proto(frame.outputs.token_columns)
        columns.token_ids = array(UINT32, [(token + 1) % outputs.vocab_size() for token in columns.token_ids])
        fill_columns(frame.outputs.token_columns, columns)
    for output in frame.outputs.outputs:
        output.new_token_ids[:] = [(token + 1) % outputs.vocab_size() for token in output.new_token_ids]


def _lose_first(output: pb.EngineCoreOutput) -> None:
    """Remove the first token of an output, as if it had been lost."""
    if not output.new_token_ids:
        return
    output.offset += 1
    del output.new_token_ids[0]
    if output.HasField("new_logprobs"):
        logprobs, start = output.new_logprobs, output.new_logprobs.offsets[1]
        kept = [offset - start for offset in logprobs.offsets[1:]]
        logprobs.offsets[:] = kept
        for entries in (logprobs.token_ids, logprobs.logprobs, logprobs.ranks):
            del entries[:start]
