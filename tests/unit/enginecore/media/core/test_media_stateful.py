"""Random lives of an engine whose prompts have media: rows are there for every token that needs them, and every request ends
once.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from penstock_common.types.media import EmbedRun
from penstock_enginecore.config import MultimodalConfig, SpeculativeConfig
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.core.model_info import MediaInfo
from tests.fakes.engines.engine_harness import assert_nothing_left, expected_output, make_request, run_to_end, step
from tests.fakes.engines.engine_lives import ENGINES, LIVES, REQUESTS, VOCAB, EngineLives
from tests.fakes.engines.fake_encoder import make_feature
from tests.fakes.engines.fake_executor import oracle_token

LENGTHS = {number: 1 + number % 6 for number in range(12)}
"""Number of positions by item; items 10 and 11 cannot be read."""
UNREADABLE = (10, 11)


def item(number, offset, modality):
    """Return a media item. Some items have tokens between their embeddings, and one consists of given embeddings."""
    length = LENGTHS[number]
    runs = (EmbedRun(1, 1), EmbedRun(3, length - 3)) if length > 4 else ()
    return make_feature(number, offset, length, modality=modality, embed_runs=runs, embeds=number == 7)


def drafter_of(held):
    """Return a drafter whose first ``held`` tokens are right."""

    def draft(seed, index, count):
        right = [oracle_token(seed, i, VOCAB) for i in range(index, index + count)]
        return [token if place < held else (token + 1) % VOCAB for place, token in enumerate(right)]

    return draft


class MediaMachine(EngineLives):
    """The fake executor encodes as workers do, and checks each step's contract. Prompts may have more media than there is room
    for.
    """

    @initialize(
        num_blocks=st.integers(6, 20),
        budget=st.integers(8, 24),
        windows=st.sampled_from([(None, None), (6, None), (3, 9)]),
        both_ways=st.booleans(),
        size=st.integers(6, 16),
        num_blocks_of_tower=st.integers(1, 5),
        max_num_encoder_tokens=st.integers(0, 12),
        drafter=st.sampled_from([None, None, 0, 1, 3]),
        **ENGINES,
    )
    def start(self, both_ways, size, num_blocks_of_tower, drafter, **config):
        """Start an engine. ``drafter`` is the number of correct drafts out of three; None means no drafter."""
        facts = {"max_embeds": 6, "max_tokens": 6, "num_blocks": num_blocks_of_tower}
        self.unreadable = {f"{number:064x}": 1 + number % num_blocks_of_tower for number in UNREADABLE}
        self.size = size
        self.begin(
            executor={
                "media": (
                    MediaInfo(modality="image", max_span=6 if both_ways else 0, **facts),
                    MediaInfo(modality="audio", **facts),
                ),
                "unreadable": self.unreadable.get,
                "drafter": None if drafter is None else drafter_of(drafter),
            },
            multimodal=MultimodalConfig(encoder_cache_size=size),
            speculative=SpeculativeConfig()
            if drafter is None
            else SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False),
            **config,
        )

    def prepared(self, executor):
        executor.encoder.capacity = self.size
        return executor

    @rule(
        target=EngineLives.requests,
        family=st.integers(0, 3),
        num_shared=st.integers(0, 5),
        places=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3)), max_size=2),
        behind=st.integers(0, 6),
        audio=st.booleans(),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 8),
        life=st.one_of(st.none(), st.none(), st.floats(0.5, 20)),
        **REQUESTS,
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
            request_id=self.name(poison),
            deadline=None if life is None else self.clock.now + life,
            cache_salt=salt,
            mm_features=features,
            **fields,
        )
        return self.queue(request)

    @rule(preempt_running=st.booleans())
    def reset(self, preempt_running):
        self.control.reset_prefix_cache(preempt_running)

    @rule()
    def reset_encoder_cache(self):
        self.engine.scheduler.reset_encoder_cache()

    @rule()
    def unreadable_items_change(self):
        """Swap readable and unreadable items. The engine must not remember the earlier state."""
        for identifier, blocks in self.unreadable.items():
            self.unreadable[identifier] = 0 if blocks else 1

    @rule()
    def a_step_loses_its_peers(self):
        """Schedule a step and then take it back."""
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
        self.assert_all_ended()

    def expected(self, request):
        return expected_output(request, max_model_len=self.engine.max_model_len, vocab_size=VOCAB)

    def excused(self, request, end):
        if end.error.reason == "MEDIA_UNREADABLE":
            assert any(feature.identifier in self.unreadable for feature in request.mm_features)
            assert end.error.code == "INVALID_ARGUMENT"
            assert self.transcript.tokens[request.request_id] == []
            return True
        return end.error.reason == "KV_CACHE_TOO_SMALL"


def _lose_peers(grammar=None):
    raise CollectiveBroken("a rank has gone")


MediaMachine.TestCase.settings = LIVES
TestRandomLivesWithMedia = MediaMachine.TestCase


@pytest.mark.slow
class TestManyRandomLivesWithMedia(MediaMachine.TestCase):
    """Runs more examples, different ones each time."""

    settings = settings(TestRandomLivesWithMedia.settings, max_examples=500, derandomize=False)
