"""Random lives of an engine whose prompts have media: rows are there for every token that needs them, and every request ends
once.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from penstock_common.types.media import EmbedRun
from penstock_common.types.outputs import FinishReason
from penstock_enginecore.config import MultimodalConfig, SpeculativeConfig
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.model_info import MediaInfo
from penstock_enginecore.core.scheduler.base import PauseState
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
from tests.fakes.engines.fake_encoder import make_feature
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_token

VOCAB = 50
LENGTHS = {number: 1 + number % 6 for number in range(12)}
"""By item, its positions; items 10 and 11 cannot be read."""
UNREADABLE = (10, 11)


def item(number, offset, modality):
    """Some have tokens between their embeddings, and some are embeddings."""
    length = LENGTHS[number]
    runs = (EmbedRun(1, 1), EmbedRun(3, length - 3)) if length > 4 else ()
    return make_feature(number, offset, length, modality=modality, embed_runs=runs, embeds=number == 7)


def poisoned(scheduled):
    """A step fails that computes token n, or one behind it, of a request poison-n-..."""
    after = scheduled.num_tokens_after.items()
    return any(key.startswith("poison") and count >= int(key.split("-")[1]) for key, count in after)


def drafter_of(held):
    """One whose first tokens are right, ``held`` of them."""

    def draft(seed, index, count):
        right = [oracle_token(seed, i, VOCAB) for i in range(index, index + count)]
        return [token if place < held else (token + 1) % VOCAB for place, token in enumerate(right)]

    return draft


class MediaMachine(RuleBasedStateMachine):
    """The fake executor encodes as workers do, and checks each step's contract. Prompts may have more media than there is room
    for.
    """

    requests = Bundle("requests")

    @initialize(
        num_blocks=st.integers(6, 20),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(8, 24),
        max_num_seqs=st.integers(1, 5),
        threshold=st.sampled_from([0, 0, 3]),
        prefix_caching=st.sampled_from([True, True, False]),
        windows=st.sampled_from([(None, None), (6, None), (3, 9)]),
        both_ways=st.booleans(),
        size=st.integers(6, 16),
        num_blocks_of_tower=st.integers(1, 5),
        max_num_encoder_tokens=st.integers(0, 12),
        fails_late=st.booleans(),
        late=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        async_scheduling=st.booleans(),
        max_concurrent_batches=st.integers(1, 3),
        drafter=st.sampled_from([None, None, 0, 1, 3]),
    )
    def start(
        self,
        num_blocks,
        block_size,
        budget,
        max_num_seqs,
        threshold,
        prefix_caching,
        windows,
        both_ways,
        size,
        num_blocks_of_tower,
        fails_late,
        late,
        drafter,
        **config,
    ):
        """``drafter``: how many of its three drafts are right; None: there is none."""
        self.clock = FakeClock()
        self.budget = budget
        facts = {"max_embeds": 6, "max_tokens": 6, "num_blocks": num_blocks_of_tower}
        self.unreadable = {f"{number:064x}": 1 + number % num_blocks_of_tower for number in UNREADABLE}
        executor = FakeExecutor(
            vocab_size=VOCAB,
            block_size=block_size,
            model_max_len=48,
            available_memory=0,
            unhurried=True,
            late=late,
            windows=windows,
            fails=poisoned,
            fails_late=fails_late,
            media=(
                MediaInfo(modality="image", attends_both_ways=both_ways, **facts),
                MediaInfo(modality="audio", **facts),
            ),
            unreadable=self.unreadable.get,
            drafter=None if drafter is None else drafter_of(drafter),
        )
        executor.encoder.capacity = size
        self.engine = make_engine(
            executor,
            self.clock,
            num_blocks=1 + (num_blocks - 1) * len(set(windows)),
            block_size=block_size,
            prefix_caching=prefix_caching,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            long_prefill_token_threshold=threshold,
            multimodal=MultimodalConfig(encoder_cache_size=size),
            speculative=SpeculativeConfig()
            if drafter is None
            else SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False),
            **config,
        )
        self.control = EngineControl(self.engine)
        self.transcript = Transcript()
        self.added = {}
        self.aborted = set()

    @rule(
        target=requests,
        family=st.integers(0, 3),
        num_shared=st.integers(0, 5),
        places=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3)), max_size=2),
        behind=st.integers(0, 6),
        audio=st.booleans(),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 8),
        life=st.one_of(st.none(), st.none(), st.floats(0.5, 20)),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(["", "", "a", "b"]),
        salt=st.sampled_from(["", "", "salt"]),
        poison=st.sampled_from([0, 0, 0, 0, 0, 0, 1, 4, 15]),
    )
    def add_request(self, family, num_shared, places, behind, audio, life, salt, poison, **fields):
        # Few families of prompts, so that prefixes are shared.
        shared = [((family * 5 + i * (3 + family)) % 10, (family + i) % 3) for i in range(num_shared)]
        prompt, features = [], []
        for number, before in [*shared, *places]:
            if len(prompt) + before + LENGTHS[number] > 40:
                break
            prompt += [1] * before
            if number in UNREADABLE and number % 2 and features:
                continue  # mostly readable
            features.append(item(number, len(prompt), "audio" if audio and number % 2 else "image"))
            prompt += [0] * LENGTHS[number]
        prompt += [2] * behind
        longest = self.engine.max_model_len - 1
        features = [feature for feature in features if feature.end <= longest]
        prompt = prompt[:longest]
        request = make_request(
            prompt or [3],
            request_id=f"poison-{poison}-{len(self.added)}" if poison else "",
            deadline=None if life is None else self.clock.now + life,
            cache_salt=salt,
            mm_features=features,
            **fields,
        )
        self.added[request.request_id] = request
        self.transcript.prior[request.request_id] = 0
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

    @rule(preempt_running=st.booleans())
    def reset(self, preempt_running):
        self.control.reset_prefix_cache(preempt_running)

    @rule()
    def reset_encoder_cache(self):
        self.engine.scheduler.reset_encoder_cache()

    @rule()
    def unreadable_items_change(self):
        """What could not be read can be, and the reverse. Nothing of it may stay."""
        for identifier, blocks in self.unreadable.items():
            self.unreadable[identifier] = 0 if blocks else 1

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

    @rule()
    def a_step_loses_its_peers(self):
        """It is scheduled, and then taken back."""
        executor = self.engine.executor
        if self.engine._steps or executor._late or executor.fails_late or self.engine.config.scheduler.async_scheduling:
            return
        sample, executor.sample_tokens = executor.sample_tokens, _lose_peers
        try:
            step(self.engine, self.transcript)
        except CollectiveBroken:
            for frame in self.engine.scheduler.take_outputs().values():
                self.transcript.add(frame)
        finally:
            executor.sample_tokens = sample

    def step(self, drain_aborts=lambda: None):
        step(self.engine, self.transcript, drain_aborts)
        self.control.after_step()
        for scheduled in self.engine.executor.steps:
            assert scheduled.total_num_scheduled_tokens <= self.budget
        self.engine.executor.steps.clear()

    @invariant()
    def pins_are_those_of_running_requests(self):
        if not hasattr(self, "engine"):
            return
        work = self.engine.scheduler._encoder
        requests = self.engine.scheduler._requests.by_key
        pinned = {}
        for key, indices in work._pins.items():
            for index in indices:
                identifier = requests[key].mm_features[index].identifier
                pinned[identifier] = pinned.get(identifier, 0) + 1
        items = work._cache._items
        assert {name: rows.num_users for name, rows in items.items() if rows.num_users} == pinned
        assert sum(rows.num_embeds for rows in items.values()) == work._cache.num_embeds <= work._cache.capacity
        claims = {(key, wanted.feature.identifier) for key, wanted in work._claimed.items()}
        assert {(key, name) for name, rows in items.items() for key in rows.claims} == claims
        assert work._num_to_ask >= 0
        assert set(work._line) <= set(requests)
        assert set(work._pins) <= {request.key for request in self.engine.scheduler._running}

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.control.wake_up()
        self.control.resume()
        run_to_end(self.engine, transcript=self.transcript)
        assert_nothing_left(self.engine)
        work = self.engine.scheduler._encoder
        stats = self.engine.scheduler.stats().media
        assert (stats.pending_embeds, stats.num_waiting_reqs) == (0, 0)
        assert not work._pins
        assert not work._claimed
        assert set(work._cache._items) == set(work._cache.not_pinned)
        assert set(self.transcript.ends) == set(self.added)
        for request_id, request in self.added.items():
            tokens, reason = expected_output(request, max_model_len=self.engine.max_model_len, vocab_size=VOCAB)
            got, end = self.transcript.tokens[request_id], self.transcript.ends[request_id]
            may_fail = any(feature.identifier in self.unreadable for feature in request.mm_features)
            if end.finish_reason is FinishReason.ABORT and end.error is not None:
                assert end.error.reason in ("DEADLINE_EXCEEDED", "PAUSED")
            elif end.error is not None and end.error.reason == "MEDIA_UNREADABLE":
                assert may_fail
                assert end.error.code == "INVALID_ARGUMENT"
                assert got == []
            elif end.error is not None and request_id.startswith("poison"):
                assert (end.finish_reason, end.error.reason) == (FinishReason.ERROR, "STEP_FAILED")
            elif end.error is not None:
                assert end.error.reason == "KV_CACHE_TOO_SMALL", end.error
            elif request_id in self.aborted:
                assert end.finish_reason is FinishReason.ABORT
            else:
                assert end.finish_reason is reason
                assert got == tokens
            assert got == tokens[: len(got)]


def _lose_peers(grammar=None):
    raise CollectiveBroken("a rank has gone")


MediaMachine.TestCase.settings = settings(
    max_examples=80,
    derandomize=True,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestRandomLivesWithMedia = MediaMachine.TestCase


@pytest.mark.slow
class TestManyRandomLivesWithMedia(MediaMachine.TestCase):
    """Others each time."""

    settings = settings(TestRandomLivesWithMedia.settings, max_examples=500, derandomize=False)
