"""Random lives of an engine with recurrent states: every step reads the states of its requests' own prefixes, whatever
happens, and at the end all slots and rows are free.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, multiple, rule

from penstock_common.types.kv_transfer import STATE_GROUP, KvSource
from penstock_common.types.outputs import FinishReason
from penstock_enginecore.config import SpeculativeConfig
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.kv_transfer.core.leases import Leases
from penstock_enginecore.kv_transfer.core.size_class import TierPlan
from penstock_enginecore.states.core.spec import SPAN, StateNeeds
from tests.fakes.engines.engine_harness import (
    CLIENT,
    assert_nothing_left,
    begin_tiers,
    expected_output,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.engines.engine_lives import ENGINES, LIVES, REQUESTS, VOCAB, EngineLives
from tests.fakes.engines.fake_disk import FakeDisk
from tests.fakes.engines.fake_executor import oracle_token

MAX_LEN = 160
IDENTITY = KvSource(engine_id="a", incarnation="1", address="a:1", lease_id=b"", num_tokens=0, fingerprint=bytes(16))
SLOT_BYTES = 100
NEEDS = StateNeeds(num_layers=1, slot_bytes=SLOT_BYTES, row_bytes=0)
REQUEST_BYTES = 2 * SLOT_BYTES


def breaks(key, num_tokens):
    """Return whether the state of a request named broken-n-... is not finite: from token n on."""
    return key.startswith("broken") and num_tokens >= int(key.split("-")[1])


def drafter_of(held):
    """Return a drafter whose first ``held`` tokens are right. If ``held`` is -1, their number depends on the place."""

    def draft(seed, index, count):
        right = [oracle_token(seed, i, VOCAB) for i in range(index, index + count)]
        good = (seed * 5 + index * 7) % (count + 1) if held < 0 else held
        return right[:good] + [(token + 1) % VOCAB for token in right[good:]]

    return None if held is None else draft


class StatesMachine(EngineLives):
    """Engines with pools of few slots: kept states, chunks, drafts, steps in flight, failed steps, states that are not
    finite, preemptions, sleep and resets.
    """

    @initialize(
        num_blocks=st.sampled_from([11, 14, 30, 60]),
        budget=st.sampled_from([1, 7, 16, 17, 40, 100]),
        windows=st.sampled_from([(None, None), (None, 20), (18, None), (20, 20), ()]),
        interval=st.sampled_from([16, 16, 32, 48, None]),
        share=st.sampled_from([0.02, 0.2, 0.6]),
        fits=st.integers(1, 5),
        held=st.sampled_from([None, None, 0, 1, 4, 20, -1]),
        num_drafts=st.sampled_from([1, 4, 15]),
        watermark=st.sampled_from([0.0, 0.25]),
        in_group=st.booleans(),
        **(ENGINES | {"block_size": st.just(SPAN), "threshold": st.sampled_from([0, 0, 21])}),
    )
    def start(self, interval, share, fits, held, num_drafts, max_num_seqs, in_group, **config):
        """Start an engine. States of ``fits`` requests fit into a quarter of the memory. Ranks of a group run one step
        at a time.
        """
        if in_group:
            config |= {"late": False, "fails_late": False, "async_scheduling": False, "max_concurrent_batches": 1}
        self.in_group = in_group
        speculative = SpeculativeConfig()
        if held is not None:
            speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts, adaptive=False)
        self.num_fitting = min(max_num_seqs, max(fits, 2))
        self.begin(
            executor={"states": NEEDS, "breaks": breaks, "drafter": drafter_of(held)},
            speculative=speculative,
            state_interval=interval,
            state_share=share,
            model_max_len=MAX_LEN,
            available_memory=4 * max(fits, 2) * REQUEST_BYTES,
            max_num_seqs=max_num_seqs,
            **config,
        )
        assert self.states.config.num_requests == self.num_fitting

    @property
    def states(self):
        return self.engine.scheduler.kv_cache.states

    @property
    def max_len(self):
        return self.engine.max_model_len

    @rule(
        target=EngineLives.requests,
        prompt_length=st.one_of(st.integers(1, 110), st.sampled_from([15, 16, 17, 31, 32, 33, 48, 49, 64, 65])),
        family=st.integers(0, 2),
        tail=st.integers(0, 3),
        copies=st.sampled_from([1, 1, 1, 2, 4]),
        broken=st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, 1, 17, 40]),
        seed=st.integers(0, 2),
        max_tokens=st.integers(1, 50),
        skip_reading_prefix_cache=st.sampled_from([None, None, None, True]),
        **(REQUESTS | {"poison": st.sampled_from([0, 0, 0, 0, 0, 0, 1, 20, 45])}),
    )
    def add_requests(self, prompt_length, family, tail, copies, broken, poison, salt, priority, **sampling):
        """Queue equal requests. Few families of prompts share beginnings, and differ in the last tokens."""
        prompt_length = min(prompt_length, self.max_len - 1)
        shared = max(prompt_length - tail, 1)
        prompt = [(family * 3 + i * (1 + family)) % VOCAB for i in range(shared)]
        prompt += [VOCAB - 1 - tail] * (prompt_length - shared)
        ids = []
        for _ in range(copies):
            name = f"broken-{broken}-{len(self.added)}" if broken else self.name(poison)
            ids.append(
                self.queue(make_request(prompt, request_id=name, cache_salt=salt, priority=priority, **sampling))
            )
        return multiple(*ids)

    @rule(target=EngineLives.requests, data=st.data(), new=st.integers(1, 40), max_tokens=st.integers(1, 20))
    def next_turn(self, data, new, max_tokens):
        """Queue a request that continues the tokens of an ended one."""
        ended = sorted(self.transcript.ends)
        if not ended:
            return multiple()
        before = self.added[data.draw(st.sampled_from(ended))]
        prompt = [*before.prompt_token_ids, *self.transcript.tokens[before.request_id], *([3] * new)][
            : self.max_len - 1
        ]
        salt = before.context.cache_salt
        return self.queue(make_request(prompt, cache_salt=salt, seed=1, max_tokens=max_tokens))

    @rule(count=st.integers(6, 20))
    def many_steps(self, count):
        self.steps(count)

    @rule(preempt_running=st.booleans())
    def reset(self, preempt_running):
        self.engine.finish_steps()
        was_running = self.engine.scheduler.stats().num_running_reqs > 0
        assert self.control.reset_prefix_cache(preempt_running) == (preempt_running or not was_running)

    @rule()
    def running_requests_are_preempted(self):
        self.engine.scheduler.preempt_all()

    @rule(count=st.integers(0, 6))
    def a_step_loses_its_peers(self, count):
        """After some steps, schedule a step and then take it back."""
        self.steps(count)
        executor = self.engine.executor
        if not self.in_group or self.engine._steps:
            return
        sample, executor.sample_tokens = executor.sample_tokens, _lose_peers
        try:
            step(self.engine, self.transcript)
        except CollectiveBroken:
            for frame in self.engine.scheduler.take_outputs().values():
                self.transcript.add(frame)
        finally:
            executor.sample_tokens = sample

    @invariant()
    def slots_and_rows_are_free_or_held_as_often_as_counted(self):
        if not hasattr(self, "engine"):
            return
        states, scheduler = self.states, self.engine.scheduler
        pool, held = states.pool, states._requests
        assert set(held) == {request.key for request in scheduler._running}
        assert len(held) <= self.num_fitting
        references = dict.fromkeys(range(len(pool.blocks)), 0)
        for request in held.values():
            for slot in (*request.own, *request.shared.values()):
                references[slot.block_id] += slot is not pool.null_block
        for slot in self.slots_under_copies():
            references[slot] += 1
        assert [slot.ref_count for slot in pool.blocks] == list(references.values())
        assert pool.num_free_blocks == pool.num_usable_blocks - sum(count > 0 for count in references.values())
        rows = [*states._free_rows, *(request.rows for request in held.values())]
        assert sorted(rows) == list(range(self.num_fitting))
        owners = [slot.block_id for request in held.values() for slot in request.own]
        assert len(set(owners)) == len(owners)
        assert all(references[slot] == 1 for slot in owners)
        assert pool.null_block.block_hash is None

    def slots_under_copies(self):
        """Return the slots that are reserved for waiting requests, or that are being loaded or saved."""
        return []

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.control.wake_up()
        self.control.resume()
        run_to_end(self.engine, transcript=self.transcript)
        self.read_every_kept_state()
        assert_nothing_left(self.engine)
        pool = self.states.pool
        assert pool.num_free_blocks == pool.num_usable_blocks
        assert all(slot.ref_count == 0 for slot in pool.blocks)
        assert sorted(self.states._free_rows) == list(range(self.num_fitting))
        self.assert_all_ended()

    def read_every_kept_state(self):
        """Queue all prompts and outputs once more, because the executor checks the states that they find."""
        for request in list(self.added.values()):
            tokens = [*request.prompt_token_ids, *self.transcript.tokens[request.request_id]][: self.max_len - 1]
            again = make_request(tokens, cache_salt=request.context.cache_salt, max_tokens=1)
            self.queue(again)
            run_to_end(self.engine, transcript=self.transcript)

    def expected(self, request):
        return expected_output(request, max_model_len=self.max_len, vocab_size=VOCAB)

    def excused(self, request, end):
        if end.error.reason == "KV_CACHE_TOO_SMALL":
            return True
        if request.request_id.startswith("broken"):
            assert (end.finish_reason, end.error.reason) == (FinishReason.ERROR, "STEP_FAILED")
            return True
        return False


def _lose_peers(grammar=None):
    raise CollectiveBroken("a rank has gone")


class TieredStatesMachine(StatesMachine):
    """Engines that also copy kept states to host memory and disk, and load them again. Copies may take long, fail, or
    find a damaged disk.
    """

    @initialize(
        num_blocks=st.sampled_from([11, 14, 30]),
        budget=st.sampled_from([7, 16, 40, 100]),
        windows=st.sampled_from([(None, None), (None, 20), (20, 20), ()]),
        interval=st.sampled_from([16, 16, 32, None]),
        share=st.sampled_from([0.02, 0.2, 0.6]),
        fits=st.integers(1, 4),
        held=st.sampled_from([None, None, 1, -1]),
        num_drafts=st.sampled_from([1, 15]),
        watermark=st.just(0.0),
        in_group=st.just(False),
        host_blocks=st.sampled_from([3, 60]),
        host_slots=st.sampled_from([1, 2, 60]),
        disk_slots=st.sampled_from([0, 1, 60]),
        min_load_tokens=st.sampled_from([1, 16, 40]),
        **(ENGINES | {"block_size": st.just(SPAN), "threshold": st.just(0), "prefix_caching": st.just(True)}),
    )
    def start(self, host_blocks, host_slots, disk_slots, **config):
        super().start(host_blocks=1000, **config)
        executor, has_blocks = self.engine.executor, bool(config["windows"])
        self.disks = [FakeDisk(disk_slots), FakeDisk(disk_slots)] if disk_slots else [None, None]
        begin_tiers(
            self.engine,
            TierPlan(executor.copier, host_blocks if has_blocks else 0, self.disks[0] if has_blocks else None),
            TierPlan(executor.state_copier(), host_slots, self.disks[1]),
        )
        kv_cache = self.engine.scheduler.kv_cache
        self.leases = Leases(kv_cache.pool.free, 6, free_slot=self.states.free_leased, max_slots=2)
        self.engine.leases.begin(self.leases, kv_cache, IDENTITY)

    @rule(data=st.data())
    def a_running_request_ends_with_a_lease(self, data):
        running = [request for request in self.engine.scheduler._running if request.num_processed_tokens]
        if not running:
            return
        request = data.draw(st.sampled_from(running))
        source = self.engine.leases.grant(request)
        self.aborted.update(self.engine.scheduler.abort_requests(CLIENT, [request.request_id]))
        if source is not None:
            lease = self.leases.get(source.lease_id)
            assert lease.slot.block_hash == request.block_hashes[source.num_tokens // SPAN - 1]

    @rule(seconds=st.floats(0.1, 6))
    def leases_end(self, seconds):
        self.clock.now += seconds
        self.engine.leases.expire()

    @rule(count=st.integers(1, 3), of_states=st.booleans())
    def copies_end(self, count, of_states):
        executor = self.engine.executor
        (executor.state_copier() if of_states else executor.copier).work(count)

    @rule(count=st.integers(1, 6), number=st.integers(0, 40))
    def other_prompts_take_the_memory(self, count, number):
        """Queue prompts that share nothing, and let steps and copies run."""
        for i in range(count):
            prompt = [(number + i) % VOCAB] * min(97, self.max_len - 1)
            self.queue(make_request(prompt, seed=i, max_tokens=1))
        for _ in range(8):
            self.steps(4)
            self.engine.executor.work()
            self.engine.executor.copy_all()

    @rule(of_states=st.booleans())
    def the_disk_is_damaged(self, of_states):
        if (disk := self.disks[of_states]) is not None:
            disk.spoiled = {name for name, _ in disk.slots.values()}

    @rule()
    def host_memory_is_damaged(self):
        copier = self.engine.executor.state_copier()
        copier.damaged = set(copier.host)

    def slots_under_copies(self):
        states, loads = self.states, self.engine.scheduler._kv_loads
        places = [place for load in loads._loads._loads.values() for place in load.places]
        loading = [place.block_id for place in places if place.name.group == STATE_GROUP]
        saving = [place.block_id for place in self.engine.connector.states.host._saving.values()]
        leased = [lease.slot.block_id for lease in self.leases._leases.values() if lease.slot is not None]
        assert len(leased) == self.leases._num_slots
        return [*loading, *saving, *leased, *(slot.block_id for slot in states._reserved.values())]

    def read_every_kept_state(self):
        self.engine.leases.revoke_all()
        super().read_every_kept_state()

    def teardown(self):
        super().teardown()
        if hasattr(self, "engine"):
            assert not self.states._reserved
            assert not self.engine.scheduler._kv_loads._loads


StatesMachine.TestCase.settings = LIVES
TestRandomLivesOfStates = StatesMachine.TestCase
TieredStatesMachine.TestCase.settings = LIVES
TestRandomLivesOfStatesInTiers = TieredStatesMachine.TestCase


@pytest.mark.slow
class TestManyRandomLivesOfStates(StatesMachine.TestCase):
    """Runs more examples, different ones each time."""

    settings = settings(TestRandomLivesOfStates.settings, max_examples=500, derandomize=False)


@pytest.mark.slow
class TestManyRandomLivesOfStatesInTiers(TieredStatesMachine.TestCase):
    """Runs more examples, different ones each time."""

    settings = settings(TestRandomLivesOfStates.settings, max_examples=500, derandomize=False)
