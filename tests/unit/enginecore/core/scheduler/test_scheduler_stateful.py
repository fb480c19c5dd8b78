"""Random lives of an engine: whatever happens, no block is lost or owned twice, and every request ends once, as it
should.
"""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from penstock_common.errors import Unavailable
from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.sampling import RepetitionDetection, StructuredOutput
from penstock_enginecore.config import LoraConfig, SpeculativeConfig
from penstock_enginecore.kv_transfer.core.size_class import TierPlan
from penstock_enginecore.lora.core.request import LoadedLora, PartlyLoadedError
from tests.fakes.engines.engine_harness import (
    assert_nothing_left,
    begin_tiers,
    expected_output,
    make_request,
    run_to_end,
)
from tests.fakes.engines.engine_lives import ENGINES, LIVES, REQUESTS, VOCAB, EngineLives
from tests.fakes.engines.fake_disk import FakeDisk
from tests.fakes.engines.fake_executor import oracle_token
from tests.fakes.engines.fake_grammars import FakeGrammars

EOS = frozenset({7})
ADAPTERS = {
    f"/adapters/{i}": [
        LoadedLora(digest=bytes([i, version]) * 8, max_rank=1 + i, modules=("m",), num_bytes=2**20)
        for version in range(2)
    ]
    for i in range(4)
} | {"/adapters/copy": [LoadedLora(digest=bytes([0, 1]) * 8, max_rank=1, modules=("m",), num_bytes=2**20)] * 2}
"""Possible adapters at each path; the test switches between them. One adapter is at two paths."""
REFUSALS = ("LORA_CACHE_FULL", "LORA_CHANGED", "LORA_UNAVAILABLE")


def digest_of(path, version):
    """Return the digest of an adapter that may be at a path. It is empty if ``version`` is None."""
    return b"" if version is None else ADAPTERS[path][version].digest


def drafter_of(kind):
    """Return a drafter that is always right, never, up to the first or second token, or by chance.

    None drafts nothing.
    """

    def draft(seed, index, count):
        right = [oracle_token(seed, i, VOCAB) for i in range(index, index + count)]
        held = {"right": count, "wrong": 0, "up to 1": 1, "up to 2": 2, "chance": (seed + index) % 3}[kind]
        drafts = right[:held] + [(token + 1) % VOCAB for token in right[held:]]
        return drafts[: (seed * 7 + index * 3) % (count + 1)] if kind == "chance" else drafts

    return None if kind is None else draft


class EngineMachine(EngineLives):
    """Resets, adapters, constraints, drafts and copies of blocks beside, on pools of a few blocks, with one or several
    steps in flight, and requests that steps fail of.
    """

    @initialize(
        num_blocks=st.integers(4, 14),
        budget=st.integers(1, 24),
        watermark=st.sampled_from([0.0, 0.25]),
        chunked=st.sampled_from([True, True, False]),
        windows=st.sampled_from([(None, None), (None, 1), (6, None, None), (5, 5), (3, 9), (1, 1)]),
        drafter=st.sampled_from([None, "right", "wrong", "up to 1", "up to 2", "chance"]),
        num_drafts=st.integers(1, 5),
        max_loras=st.integers(1, 3),
        room=st.integers(2, 5),
        max_wait=st.sampled_from([0.0, 1.0, 10.0]),
        loads_at_once=st.booleans(),
        host_blocks=st.sampled_from([0, 2, 6, 40]),
        min_load_tokens=st.integers(1, 6),
        disk_slots=st.sampled_from([0, 2, 30]),
        **ENGINES,
    )
    def start(
        self,
        budget,
        chunked,
        drafter,
        num_drafts,
        max_loras,
        room,
        max_wait,
        prefix_caching,
        host_blocks,
        disk_slots,
        **config,
    ):
        speculative = SpeculativeConfig()
        if drafter is not None:
            speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts, adaptive=False)
        self.loads_at_once = config.pop("loads_at_once")
        self.max_loras = max_loras
        self.grammars = FakeGrammars(VOCAB, *EOS, manual=True)
        self.begin(
            budget=budget if chunked else 64,
            executor={"eos_token_ids": EOS, "drafter": drafter_of(drafter)},
            grammars=self.grammars,
            prefix_caching=prefix_caching,
            host_blocks=host_blocks if prefix_caching else 0,
            enable_chunked_prefill=chunked,
            speculative=speculative,
            lora=LoraConfig(max_loras=max_loras, cpu_memory=room * 2**20, max_wait=max_wait),
            **config,
        )
        if disk_slots and host_blocks and prefix_caching:
            begin_tiers(self.engine, TierPlan(self.engine.executor.copier, host_blocks, FakeDisk(disk_slots)))
        self.answers = []

    def prepared(self, executor):
        executor.adapters.update({path: versions[0] for path, versions in ADAPTERS.items()})
        executor.loads_at_once = self.loads_at_once
        return executor

    @rule(
        target=EngineLives.requests,
        prompt_length=st.integers(1, 20),
        family=st.integers(0, 2),
        seed=st.integers(0, 5),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        min_tokens=st.integers(0, 1),
        ignore_eos=st.booleans(),
        num_prior=st.sampled_from([0, 0, 0, 3]),
        life=st.one_of(st.none(), st.floats(0.5, 20)),
        attempt=st.sampled_from([0, 0, 1]),
        tenant_weight=st.sampled_from([1.0, 1.0, 0.5, 3.0]),
        constraint=st.sampled_from([None, None, "even", "odd:4"]),
        repetition=st.sampled_from([None, None, RepetitionDetection(max_pattern_size=2)]),
        adapter=st.sampled_from([None, None, *ADAPTERS]),
        version=st.sampled_from([0, 0, 1, None]),
        **REQUESTS,
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
        # Few different prompt beginnings, so that requests have common prefixes.
        prompt_length = min(prompt_length, self.engine.max_model_len - 1)
        request = make_request(
            [(family * 3 + i * (1 + family)) % VOCAB for i in range(prompt_length)],
            request_id=self.name(poison),
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
        return self.queue(request)

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
        """Return the expected tokens. A request without a digest keeps the adapter that it began with."""
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
        disk = self.engine.connector and self.engine.connector.blocks.disk
        if disk:
            disk._store.spoiled = {name for name, _ in disk._store.slots.values()}

    @rule(seconds=st.floats(0.1, 2))
    def copies_take_long(self, seconds):
        self.clock.now += seconds
        self.engine.executor.copier.work(1)

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
        """Return the blocks that are being loaded or saved."""
        loads = self.engine.scheduler._kv_loads
        if loads is None:
            return []
        brought = [place.block_id for load in loads._loads._loads.values() for place in load.places]
        return [*brought, *(place.block_id for place in self.engine.connector.blocks.host._saving.values())]

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
        for _ in range(20):  # blocks freed meanwhile are loaded again, and may find no free block
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
        self.assert_all_ended()

    def excused(self, request, end):
        if request.lora is None or end.error.reason not in REFUSALS:
            return False
        assert self.transcript.tokens[request.request_id] == []
        assert (end.error.retry_after == 1.0) == (end.error.reason == "LORA_CACHE_FULL")
        assert request.lora.digest or end.error.reason != "LORA_CHANGED"
        return True


EngineMachine.TestCase.settings = LIVES
TestRandomLives = EngineMachine.TestCase


@pytest.mark.slow
class TestManyRandomLives(EngineMachine.TestCase):
    """Runs more examples, different ones each time."""

    settings = settings(TestRandomLives.settings, max_examples=500, derandomize=False)
