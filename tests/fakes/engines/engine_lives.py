"""Random events of an engine, independent of its requests, and the possible results of its requests."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from penstock_common.types.outputs import EngineCoreOutput, FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.scheduler.base import PauseState
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from tests.fakes.engines.engine_harness import CLIENT, FakeClock, Transcript, add, make_engine, step
from tests.fakes.engines.fake_executor import FakeExecutor

VOCAB = 50
MODES = st.sampled_from(["abort", "wait", "keep"])
LIVES = settings(
    max_examples=80,
    derandomize=True,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
ENGINES = {
    "block_size": st.sampled_from([1, 2, 4]),
    "max_num_seqs": st.integers(1, 5),
    "threshold": st.sampled_from([0, 0, 3]),
    "prefix_caching": st.sampled_from([True, True, False]),
    "fails_late": st.booleans(),
    "late": st.booleans(),
    "policy": st.sampled_from(["fcfs", "priority"]),
    "async_scheduling": st.booleans(),
    "max_concurrent_batches": st.integers(1, 3),
}
"""Options for engines of each kind."""
REQUESTS = {
    "priority": st.integers(0, 2),
    "tenant": st.sampled_from(["", "", "a", "b"]),
    "salt": st.sampled_from(["", "", "salt"]),
    "poison": st.sampled_from([0, 0, 0, 0, 0, 0, 1, 4, 15]),
}


def poisoned(scheduled: SchedulerOutput) -> bool:
    """Return whether the step must fail: it computes token n or a later one of a request named poison-n-..."""
    drafts = scheduled.scheduled_spec_decode_tokens
    return any(
        key.startswith("poison") and count - len(drafts.get(key, ())) >= int(key.split("-")[1])
        for key, count in scheduled.num_tokens_after.items()
    )


class EngineLives(RuleBasedStateMachine):
    """State machine with aborts, steps, pauses, sleeps and passing time.

    ``begin`` creates the engine with a fake executor. The executor checks the contract of each step: immediately, or
    later when its device executes the step.
    """

    requests = Bundle("requests")

    def begin(
        self,
        *,
        budget: int,
        num_blocks: int,
        windows: tuple[int | None, ...],
        block_size: int,
        threshold: int,
        late: bool,
        fails_late: bool,
        executor: dict[str, Any],
        grammars: Any = None,
        model_max_len: int = 48,
        available_memory: int = 0,
        **config: Any,
    ) -> None:
        """Start an engine. ``executor`` has additional options of the executor."""
        self.clock = FakeClock()
        self.budget = budget
        self.max_num_seqs = config["max_num_seqs"]
        made = FakeExecutor(
            vocab_size=VOCAB,
            block_size=block_size,
            model_max_len=model_max_len,
            available_memory=available_memory,
            unhurried=True,
            late=late,
            windows=windows,
            fails=poisoned,
            fails_late=fails_late,
            **executor,
        )
        self.engine = make_engine(
            self.prepared(made),
            self.clock,
            grammars,
            num_blocks=1 + (num_blocks - 1) * max(len(set(windows)), 1),
            block_size=block_size,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            **config,
        )
        self.control = EngineControl(self.engine)
        self.transcript = Transcript()
        self.added: dict[str, EngineCoreRequest] = {}
        self.aborted: set[str] = set()

    def prepared(self, executor: FakeExecutor) -> FakeExecutor:
        """Return the executor, prepared for use in an engine."""
        return executor

    def name(self, poison: int) -> str:
        """Return the name of the next request."""
        return f"poison-{poison}-{len(self.added)}" if poison else ""

    def queue(self, request: EngineCoreRequest) -> str:
        """Add a request. Returns its id."""
        self.added[request.request_id] = request
        self.transcript.prior[request.request_id] = len(request.prior_output_token_ids)
        add(self.engine, request)
        return request.request_id

    @rule(request_id=consumes(requests))
    def abort(self, request_id):
        self.aborted.update(self.engine.scheduler.abort_requests(CLIENT, [request_id]))

    @rule(count=st.integers(1, 3))
    def the_device_gets_on(self, count):
        self.engine.executor.work(count)

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.step()

    @rule(request_id=consumes(requests))
    def abort_during_a_step(self, request_id):
        self.step(lambda: self.abort(request_id))

    @rule(mode=MODES, clear_cache=st.booleans())
    def pause(self, mode, clear_cache):
        done = self.control.pause(mode, clear_cache)
        assert done.done() == (self.engine.scheduler.pause_state is PauseState.PAUSED)

    @rule(level=st.integers(0, 2), mode=MODES)
    def sleep(self, level, mode):
        self.control.sleep(level, mode)

    @rule()
    def wake_up(self):
        self.control.wake_up()

    @rule()
    def resume(self):
        if not self.control.is_sleeping():
            self.control.resume()

    @rule(seconds=st.floats(0.1, 5))
    def time_passes(self, seconds):
        self.clock.now += seconds

    def step(self, drain_aborts=lambda: None):
        step(self.engine, self.transcript, drain_aborts)
        self.control.after_step()
        for scheduled in self.engine.executor.steps:
            assert scheduled.total_num_scheduled_tokens <= self.budget
            assert len(scheduled.num_scheduled_tokens) <= self.max_num_seqs
        self.engine.executor.steps.clear()

    def assert_all_ended(self) -> None:
        """Check that every request has ended exactly once, and that its tokens are the expected ones up to its end."""
        assert set(self.transcript.ends) == set(self.added)
        for request_id, request in self.added.items():
            tokens, reason = self.expected(request)
            got = [*request.prior_output_token_ids, *self.transcript.tokens[request_id]]
            end = self.transcript.ends[request_id]
            if end.finish_reason is FinishReason.ABORT and end.error is not None:
                assert end.error.reason in ("DEADLINE_EXCEEDED", "PAUSED")
            elif end.error is not None and self.excused(request, end):
                pass
            elif end.error is not None and request_id.startswith("poison"):
                assert (end.finish_reason, end.error.reason) == (FinishReason.ERROR, "STEP_FAILED")
            elif request_id in self.aborted:
                assert end.finish_reason is FinishReason.ABORT
            else:
                assert end.error is None, end.error
                assert end.finish_reason is reason
                assert got == tokens
            assert got == tokens[: len(got)]

    def expected(self, request: EngineCoreRequest) -> tuple[list[int], FinishReason]:
        """Return the tokens and the finish reason of the request if no failure affects it."""
        raise NotImplementedError

    def excused(self, request: EngineCoreRequest, end: EngineCoreOutput) -> bool:
        """Return whether the request may have ended with this error, after checking the error."""
        raise NotImplementedError
