"""Random lives of an engine: whatever happens, no block is lost or owned twice, and every request ends once, as it should."""

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from penstock_common.errors import Unavailable
from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import RepetitionDetection, StructuredOutput
from penstock_enginecore.config import LoraConfig, SpeculativeConfig
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.scheduler.base import PauseState
from penstock_enginecore.lora.core.request import LoadedLora, PartlyLoadedError
from tests.fakes.engines.engine_harness import (
    CLIENT,
    FakeClock,
    Transcript,
    add,
    assert_nothing_left,
    expected_output,
    make_engine,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_disk import FakeDisk
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_token
from tests.fakes.engines.fake_grammars import FakeGrammars

VOCAB = 50
EOS = frozenset({7})
ADAPTERS = {
    f"/adapters/{i}": [
        LoadedLora(digest=bytes([i, version]) * 8, max_rank=1 + i, modules=("m",), num_bytes=2**20)
        for version in range(2)
    ]
    for i in range(4)
} | {"/adapters/copy": [LoadedLora(digest=bytes([0, 1]) * 8, max_rank=1, modules=("m",), num_bytes=2**20)] * 2}
"""By path, what may be there, now the one and now the other. One is in two places."""
REFUSALS = ("LORA_CACHE_FULL", "LORA_CHANGED", "LORA_UNAVAILABLE")


def digest_of(path, version):
    """Of what may be at a path; empty for None, whatever is there."""
    return b"" if version is None else ADAPTERS[path][version].digest


def drafter_of(kind):
    """One that is always right, never, right up to the first or second token, or by chance; None drafts nothing."""

    def draft(seed, index, count):
        right = [oracle_token(seed, i, VOCAB) for i in range(index, index + count)]
        held = {"right": count, "wrong": 0, "up to 1": 1, "up to 2": 2, "chance": (seed + index) % 3}[kind]
        drafts = right[:held] + [(token + 1) % VOCAB for token in right[held:]]
        return drafts[: (seed * 7 + index * 3) % (count + 1)] if kind == "chance" else drafts

    return None if kind is None else draft


def poisoned(scheduled):
    """A step fails that computes token n, or one behind it, of a request poison-n-..."""
    drafts = scheduled.scheduled_spec_decode_tokens
    return any(
        key.startswith("poison") and count - len(drafts.get(key, ())) >= int(key.split("-")[1])
        for key, count in scheduled.num_tokens_after.items()
    )


class EngineMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, pauses, resets and passing time on pools of a few blocks, with one or several steps in flight, and
    requests that steps fail of. The fake executor checks each step's contract, at once or late, when its device gets to it.
    """

    requests = Bundle("requests")

    @initialize(
        num_blocks=st.integers(4, 14),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 5),
        threshold=st.sampled_from([0, 0, 3]),
        watermark=st.sampled_from([0.0, 0.25]),
        prefix_caching=st.sampled_from([True, True, False]),
        chunked=st.sampled_from([True, True, False]),
        windows=st.sampled_from([(None, None), (None, 1), (6, None, None), (5, 5), (3, 9), (1, 1)]),
        fails_late=st.booleans(),
        late=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        async_scheduling=st.booleans(),
        max_concurrent_batches=st.integers(1, 3),
        drafter=st.sampled_from([None, "right", "wrong", "up to 1", "up to 2", "chance"]),
        num_drafts=st.integers(1, 5),
        max_loras=st.integers(1, 3),
        room=st.integers(2, 5),
        max_wait=st.sampled_from([0.0, 1.0, 10.0]),
        loads_at_once=st.booleans(),
        host_blocks=st.sampled_from([0, 2, 6, 40]),
        min_load_tokens=st.integers(1, 6),
        disk_slots=st.sampled_from([0, 2, 30]),
    )
    def start(
        self,
        num_blocks,
        block_size,
        budget,
        max_num_seqs,
        threshold,
        watermark,
        chunked,
        windows,
        fails_late,
        late,
        drafter,
        num_drafts,
        max_loras,
        room,
        max_wait,
        loads_at_once,
        prefix_caching,
        host_blocks,
        disk_slots,
        **config,
    ):
        self.clock = FakeClock()
        self.budget = budget if chunked else 64
        self.max_num_seqs = max_num_seqs
        executor = FakeExecutor(
            vocab_size=VOCAB,
            eos_token_ids=EOS,
            block_size=block_size,
            model_max_len=48,
            available_memory=0,
            unhurried=True,
            late=late,
            windows=windows,
            fails=poisoned,
            fails_late=fails_late,
            drafter=drafter_of(drafter),
        )
        speculative = SpeculativeConfig()
        if drafter is not None:
            speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts, adaptive=False)
        executor.adapters.update({path: versions[0] for path, versions in ADAPTERS.items()})
        executor.loads_at_once = loads_at_once
        self.max_loras = max_loras
        self.grammars = FakeGrammars(VOCAB, *EOS, manual=True)
        self.engine = make_engine(
            executor,
            self.clock,
            self.grammars,
            num_blocks=1 + (num_blocks - 1) * len(set(windows)),
            block_size=block_size,
            prefix_caching=prefix_caching,
            host_blocks=host_blocks if prefix_caching else 0,
            max_num_batched_tokens=self.budget,
            max_num_seqs=max_num_seqs,
            long_prefill_token_threshold=threshold,
            watermark=watermark,
            enable_chunked_prefill=chunked,
            speculative=speculative,
            lora=LoraConfig(max_loras=max_loras, cpu_memory=room * 2**20, max_wait=max_wait),
            **config,
        )
        if disk_slots and host_blocks and prefix_caching:
            self.engine.connector.begin(executor.copier, host_blocks, FakeDisk(disk_slots))
        self.control = EngineControl(self.engine)
        self.transcript = Transcript()
        self.added = {}
        self.aborted = set()
        self.answers = []

    @rule(
        target=requests,
        prompt_length=st.integers(1, 20),
        family=st.integers(0, 2),
        seed=st.integers(0, 5),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        min_tokens=st.integers(0, 1),
        ignore_eos=st.booleans(),
        num_prior=st.sampled_from([0, 0, 0, 3]),
        salt=st.sampled_from(["", "", "salt"]),
        life=st.one_of(st.none(), st.floats(0.5, 20)),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(["", "", "a", "b"]),
        attempt=st.sampled_from([0, 0, 1]),
        tenant_weight=st.sampled_from([1.0, 1.0, 0.5, 3.0]),
        constraint=st.sampled_from([None, None, "even", "odd:4"]),
        repetition=st.sampled_from([None, None, RepetitionDetection(max_pattern_size=2)]),
        poison=st.sampled_from([0, 0, 0, 0, 0, 0, 1, 4, 15]),
        adapter=st.sampled_from([None, None, *ADAPTERS]),
        version=st.sampled_from([0, 0, 1, None]),
    )
    def add_request(
        self,
        prompt_length,
        family,
        num_prior,
        salt,
        life,
        priority,
        constraint,
        repetition,
        ignore_eos,
        poison,
        adapter,
        version,
        **sampling,
    ):
        # Few families of prompts, so that prefixes are shared.
        prompt_length = min(prompt_length, self.engine.max_model_len - 1)
        request = make_request(
            [(family * 3 + i * (1 + family)) % VOCAB for i in range(prompt_length)],
            request_id=f"poison-{poison}-{len(self.added)}" if poison else "",
            cache_salt=salt,
            deadline=None if life is None else self.clock.now + life,
            priority=priority,
            ignore_eos=ignore_eos,
            structured_output=constraint and StructuredOutput(regex=constraint),
            repetition_detection=repetition,
            lora=None if adapter is None else LoraAdapter(adapter, adapter, digest_of(adapter, version)),
            **sampling,
        )
        tokens, _ = self.expected(request)
        if num_prior < len(tokens) and (adapter is None or version is not None):
            request = msgspec.structs.replace(request, prior_output_token_ids=tokens[:num_prior])
        self.added[request.request_id] = request
        self.transcript.prior[request.request_id] = len(request.prior_output_token_ids)
        add(self.engine, request)
        return request.request_id

    @rule()
    def a_load_ends(self):
        self.engine.executor.finish_load()

    @rule(path=st.sampled_from(list(ADAPTERS)), pinned=st.booleans())
    def add_lora(self, path, pinned):
        answer = self.engine.loras.add_lora(path, path, b"", pinned)
        self.answers.append((answer, path))

    @rule(path=st.sampled_from(list(ADAPTERS)), version=st.sampled_from([0, 1]))
    def remove_lora(self, path, version):
        self.engine.loras.remove_lora(digest_of(path, version))

    @rule(path=st.sampled_from(list(ADAPTERS)), version=st.sampled_from([0, 1]))
    def other_content_is_there(self, path, version):
        self.engine.executor.adapters[path] = ADAPTERS[path][version]

    @rule(path=st.sampled_from(list(ADAPTERS)), version=st.sampled_from([0, 1]))
    def some_workers_cannot_read(self, path, version):
        gone = Unavailable("one cannot read it", reason="LORA_UNAVAILABLE")
        self.engine.executor.adapters[path] = PartlyLoadedError(gone, frozenset({digest_of(path, version)}))

    def expected(self, request):
        """One that said no digest goes on with what it began with."""
        if request.lora is not None and not request.lora.digest:
            began_with = {key.rpartition("#")[0]: lora for key, lora in self.engine.executor.began_with.items()}
            lora = began_with.get(request.request_id) or request.lora
            request = msgspec.structs.replace(
                request,
                lora=msgspec.structs.replace(request.lora, digest=lora.digest or digest_of(request.lora.path, 0)),
            )
        return expected_output(request, max_model_len=self.engine.max_model_len, vocab_size=VOCAB, eos=EOS)

    @rule(count=st.integers(1, 3))
    def copies_end(self, count):
        self.engine.executor.copier.work(count)

    @rule()
    def the_disk_forgets(self):
        disk = self.engine.connector and self.engine.connector._disk
        if disk:
            disk._store.spoiled = {name for name, _ in disk._store.slots.values()}

    @rule(seconds=st.floats(0.1, 2))
    def copies_take_long(self, seconds):
        self.clock.now += seconds
        self.engine.executor.copier.work(1)

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

    @rule()
    def constraints_are_compiled(self):
        self.grammars.compile_all()

    @rule(slow=st.booleans(), prompt=st.booleans())
    def masks_change_their_pace(self, slow, prompt):
        for grammar in self.grammars.started:
            grammar.slow, grammar.prompt = slow, prompt

    @rule()
    def masks_arrive(self):
        for grammar in self.grammars.started:
            grammar.arrive()

    @rule(preempt_running=st.booleans())
    def reset(self, preempt_running):
        self.engine.finish_steps()
        was_running = self.engine.scheduler.stats().num_running_reqs > 0
        assert self.control.reset_prefix_cache(preempt_running) == (preempt_running or not was_running)

    @rule(mode=st.sampled_from(["abort", "wait", "keep"]), clear_cache=st.booleans())
    def pause(self, mode, clear_cache):
        done = self.control.pause(mode, clear_cache)
        assert done.done() == (self.engine.scheduler.pause_state is PauseState.PAUSED)

    @rule(level=st.integers(0, 2), mode=st.sampled_from(["abort", "wait", "keep"]))
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

    @invariant()
    def no_block_is_lost_or_freed_early(self):
        if not hasattr(self, "engine"):
            return
        manager = self.engine.scheduler.kv_cache
        references = {}
        for tables in manager._blocks.values():
            for block in (block for table in tables for block in table if block is not manager.pool.null_block):
                references[block.block_id] = references.get(block.block_id, 0) + 1
        for block_id in self.under_copies():
            references[block_id] = references.get(block_id, 0) + 1
        assert [block.ref_count for block in manager.pool.blocks] == [
            references.get(block.block_id, 0) for block in manager.pool.blocks
        ]
        assert manager.pool.num_free_blocks == manager.pool.num_usable_blocks - len(references)

    def under_copies(self):
        """Blocks that are brought, and those that are saved."""
        loads = self.engine.scheduler._kv_loads
        if loads is None:
            return []
        brought = [place.block_id for load in loads._loads._loads.values() for place in load.places]
        return [*brought, *(place.block_id for place in self.engine.connector._host._saving.values())]

    @invariant()
    def adapters_are_within_their_limits(self):
        if not hasattr(self, "engine"):
            return
        cache, executor = self.engine.loras.cache, self.engine.executor
        assert executor.most_loras <= self.max_loras
        assert cache.num_bytes + cache.num_reserved <= cache.capacity
        assert executor.most_held_loras * 2**20 <= cache.capacity

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.executor.loads_at_once = True
        while self.engine.executor.finish_load():
            pass
        self.control.wake_up()
        self.control.resume()
        self.grammars.compile_all()
        self.masks_arrive()
        self.masks_change_their_pace(slow=False, prompt=True)
        run_to_end(self.engine, transcript=self.transcript)
        assert_nothing_left(self.engine)
        executor, cache = self.engine.executor, self.engine.loras.cache
        for _ in range(20):  # what was let go of meanwhile is loaded again, and may find no room
            self.engine.loras.take()
            executor.work()
        assert executor.held_loras == set(cache.digests)
        assert cache.num_reserved == 0
        assert not any(cache.is_used(digest) for digest in cache.digests)
        lora = self.engine.scheduler.stats().lora
        assert (lora.active, lora.waiting, lora.num_waiting_reqs, lora.num_loading_reqs) == ([], [], 0, 0)
        for answer, path in self.answers:
            if (error := answer.exception(timeout=0)) is not None:
                assert error.reason in ("LORA_CACHE_FULL", "LORA_UNAVAILABLE")
            else:
                assert answer.result().digest in {loaded.digest for loaded in ADAPTERS[path]}
        for key, lora in executor.began_with.items():
            asked = self.added[key.rpartition("#")[0]].lora
            assert (asked is None) == (lora is None)
            if asked is not None:
                assert lora.digest in ({asked.digest} if asked.digest else {a.digest for a in ADAPTERS[asked.path]})
        assert set(self.transcript.ends) == set(self.added)
        for request_id, request in self.added.items():
            tokens, reason = self.expected(request)
            got = [*request.prior_output_token_ids, *self.transcript.tokens[request_id]]
            end = self.transcript.ends[request_id]
            if end.finish_reason is FinishReason.ABORT and end.error is not None:
                assert end.error.reason in ("DEADLINE_EXCEEDED", "PAUSED")
            elif end.error is not None and request.lora is not None and end.error.reason in REFUSALS:
                assert self.transcript.tokens[request_id] == []
                assert (end.error.retry_after == 1.0) == (end.error.reason == "LORA_CACHE_FULL")
                assert request.lora.digest or end.error.reason != "LORA_CHANGED"
            elif end.error is not None and request_id.startswith("poison"):
                assert (end.finish_reason, end.error.reason) == (FinishReason.ERROR, "STEP_FAILED")
            elif request_id in self.aborted:
                assert end.finish_reason is FinishReason.ABORT
            else:
                assert end.finish_reason is reason
                assert got == tokens
            assert got[: len(tokens)] == tokens[: len(got)]


EngineMachine.TestCase.settings = settings(
    max_examples=80,
    derandomize=True,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestRandomLives = EngineMachine.TestCase


@pytest.mark.slow
class TestManyRandomLives(EngineMachine.TestCase):
    """Others each time."""

    settings = settings(TestRandomLives.settings, max_examples=500, derandomize=False)
