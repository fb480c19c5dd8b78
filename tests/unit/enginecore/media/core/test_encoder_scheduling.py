"""Media of prompts, through an engine whose fake workers encode as real ones do and check that rows are there."""

import msgspec
import pytest

from penstock_common.errors import ConfigError
from penstock_common.types.kv_transfer import BlockMedia, BlockStored
from penstock_common.types.media import EmbedRun
from penstock_common.types.outputs import FinishReason
from penstock_enginecore.config import MultimodalConfig, SpeculativeConfig
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.model_info import MediaInfo
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput
from penstock_enginecore.core.scheduler.waiting_queue import FairQueue
from penstock_enginecore.core.steps_in_flight import EngineDeadError
from penstock_enginecore.media.core.encoder_scheduling import MediaLine, Wanted
from penstock_enginecore.media.core.receiver_cache import MediaInputs
from tests.fakes.engines.engine_harness import (
    CLIENT,
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    prepared,
    run_to_end,
    step,
    tokens_by_step,
)
from tests.fakes.engines.fake_encoder import identifier_of, make_feature
from tests.fakes.engines.fake_executor import FakeExecutor

BLOCKS = 3
IMAGE = MediaInfo(modality="image", num_blocks=BLOCKS, max_embeds=16, max_tokens=16)
WHOLE = msgspec.structs.replace(IMAGE, max_span=16)


def media_engine(*, size=0, media=(IMAGE,), unreadable=None, executor=None, **config):
    """Return an engine whose steps compute one block of 8 embeddings, unless ``max_num_encoder_tokens`` is set."""
    executor = FakeExecutor(media=media, unreadable=(unreadable or {}).get, **executor or {})
    config = {"max_num_encoder_tokens": 8, "multimodal": MultimodalConfig(encoder_cache_size=size)} | config
    engine = make_engine(executor, **config)
    executor.encoder.capacity = max(size or 64, 16)
    return engine


class StopsAtTheEnd:
    """A sink that ends a loop after a request has ended."""

    def __init__(self):
        self.transcript = Transcript()

    def emit(self, client_id, outputs):
        self.transcript.add(outputs)
        if self.transcript.ends:
            self.loop.request_shutdown()

    def draining(self, timeout):
        pass


def images(*numbers, before=2, length=8, behind=3, **fields):
    """Return a request with the given numbers of tokens before each item, and ``behind`` tokens after the last one."""
    features, prompt = [], []
    for number in numbers:
        prompt += range(100, 100 + before)
        features.append(make_feature(number, len(prompt), length))
        prompt += [0] * length
    return make_request(prompt + list(range(200, 200 + behind)), mm_features=features, **fields)


def steps_of(engine):
    """Return the tokens, encoder budget and number of encoder starts of each step."""
    return [
        (scheduled.total_num_scheduled_tokens, scheduled.encoder_budget, len(scheduled.encoder_starts))
        for scheduled in engine.executor.steps
    ]


def test_tokens_are_in_the_very_step_in_which_their_item_is_done():
    engine = media_engine()
    request = images(1, max_tokens=2)
    assert_as_expected(engine, run_to_end(engine, request), request)
    assert steps_of(engine) == [(0, 8, 1), (0, 8, 0), (13, 8, 0), (1, 0, 0), (0, 0, 0)]
    assert_nothing_left(engine)


def test_a_large_budget_encodes_and_computes_in_one_step():
    engine = media_engine(max_num_encoder_tokens=1000)
    request = images(1, max_tokens=1)
    assert_as_expected(engine, run_to_end(engine, request), request)
    assert steps_of(engine) == [(13, 1000, 1), (0, 0, 0)]


def test_unless_something_is_said_a_step_spends_as_much_as_it_has_tokens():
    engine = media_engine(max_num_encoder_tokens=0, max_num_batched_tokens=24)
    run_to_end(engine, images(1, max_tokens=1))
    assert steps_of(engine)[0] == (13, 24, 1)


def test_a_request_that_waits_for_rows_keeps_nobody_waiting():
    engine = media_engine()
    transcript = Transcript()
    add(engine, images(1, max_tokens=1), text := make_request(5, max_tokens=4))
    step(engine, transcript)
    stats = engine.scheduler.stats()
    assert (stats.num_running_reqs, stats.num_skipped_reqs, stats.media.num_waiting_reqs) == (1, 1, 1)
    assert tokens_by_step(engine) == [[5]]
    run_to_end(engine, transcript=transcript)
    assert tokens_by_step(engine)[:3] == [[5], [1], [1, 13]]
    assert_as_expected(engine, transcript, text)


def test_a_running_request_computes_up_to_what_is_not_there():
    engine = media_engine(max_num_batched_tokens=16)
    request = images(1, 2, max_tokens=1)
    assert_as_expected(engine, run_to_end(engine, request), request)
    # 2 + 8 + 2 tokens, then all tokens to the end of the second image. A block of it was encoded in the first step.
    assert tokens_by_step(engine) == [[12], [11]]
    assert [identifier_of(1), identifier_of(2)] == engine.executor.encoder.encoded


def test_beside_decodes_towers_and_prompts_take_turns():
    engine = media_engine(max_prompt_batch_tokens=12)
    transcript = Transcript()
    text = make_request(5, max_tokens=20)
    add(engine, text)
    step(engine, transcript)
    image, prompt = images(1, max_tokens=1), make_request(list(range(300, 320)), max_tokens=1)
    assert_as_expected(engine, run_to_end(engine, image, prompt, transcript=transcript), text, image, prompt)
    told = [(tokens - 1, budget) for tokens, budget, _ in steps_of(engine)[1:10]]
    # A block of the image alternates with six tokens of the prompt. Then come the rest of the prompt and the image's
    # own tokens.
    assert told == [(6, 0), (0, 8), (6, 0), (0, 8), (6, 0), (0, 8), (2, 0), (6, 0), (6, 0)]
    assert_nothing_left(engine)


def test_alone_an_item_has_the_step_in_which_its_tokens_are():
    engine = media_engine(max_prompt_batch_tokens=12)
    request = images(1, max_tokens=2)
    assert_as_expected(engine, run_to_end(engine, request), request)
    assert steps_of(engine) == [(0, 8, 1), (0, 8, 0), (13, 8, 0), (1, 0, 0), (0, 0, 0)]


def test_a_span_that_is_computed_together_has_a_step_beside_decodes():
    engine = media_engine(media=(WHOLE,), max_prompt_batch_tokens=8, max_num_batched_tokens=32)
    transcript = Transcript()
    text = make_request(5, max_tokens=20)
    add(engine, text)
    step(engine, transcript)
    image = images(1, max_tokens=1)
    assert_as_expected(engine, run_to_end(engine, image, transcript=transcript), text, image)
    assert [1, 8] in tokens_by_step(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_images_that_exceed_the_cache_together_go_through(async_scheduling):
    engine = media_engine(size=16, async_scheduling=async_scheduling, max_num_encoder_tokens=100)
    request = images(*range(1, 9), length=7, max_tokens=3)
    other = images(*range(11, 19), length=7, max_tokens=3)
    assert_as_expected(engine, run_to_end(engine, request, other), request, other)
    assert_nothing_left(engine)
    assert engine.executor.encoder.num_embeds <= 16
    assert len(engine.executor.encoder.encoded) == 16


def test_equal_items_are_encoded_once_by_requests_and_within_one():
    engine = media_engine(max_num_encoder_tokens=100)
    requests = [images(1, 1, 2, 1, length=4, cache_salt=str(i), max_tokens=2) for i in range(3)]
    assert_as_expected(engine, run_to_end(engine, *requests), *requests)
    assert engine.executor.encoder.encoded == [identifier_of(1), identifier_of(2)]
    media = engine.scheduler.stats().media
    assert (media.encoder_cache_queries, media.encoder_cache_hits, media.encoded_embeds) == (12, 10, 8)
    assert (media.pending_embeds, media.encoder_cache_usage) == (0, 8 / 64)


def test_items_covered_by_a_prefix_hit_are_not_encoded():
    engine = media_engine(max_num_encoder_tokens=100)
    first = images(1, 2, length=4, behind=4, max_tokens=1)
    run_to_end(engine, first)
    engine.scheduler.reset_encoder_cache()
    second = images(1, 2, length=4, behind=9, max_tokens=1)
    transcript = run_to_end(engine, second)
    assert_as_expected(engine, transcript, second)
    assert transcript.outputs[second.request_id][0].prefill_stats.num_cached_tokens == 16
    assert engine.executor.encoder.encoded == [identifier_of(1), identifier_of(2)]
    assert engine.scheduler.stats().media.pending_embeds == 0


def test_a_hit_that_ends_in_an_item_needs_its_rows():
    engine = media_engine(max_num_encoder_tokens=100)
    run_to_end(engine, images(1, length=8, behind=0, max_tokens=1))  # two blocks of four, and half of the item
    engine.scheduler.reset_encoder_cache()
    request = images(1, length=8, behind=1, max_tokens=1)
    transcript = run_to_end(engine, request)
    assert transcript.outputs[request.request_id][0].prefill_stats.num_cached_tokens == 8
    assert engine.executor.encoder.encoded == [identifier_of(1)] * 2


def test_another_image_at_the_same_place_is_no_hit():
    engine = media_engine()
    run_to_end(engine, images(1))
    request = images(2)
    transcript = run_to_end(engine, request)
    assert_as_expected(engine, transcript, request)
    assert transcript.outputs[request.request_id][0].prefill_stats.num_cached_tokens == 0


def test_embeddings_are_taken_as_they_are():
    engine = media_engine()
    request = make_request(12, mm_features=[make_feature(1, 2, 8, embeds=True)], max_tokens=1)
    assert_as_expected(engine, run_to_end(engine, request), request)
    assert steps_of(engine) == [(12, 0, 1), (0, 0, 0)]


def test_workers_get_small_tensors_with_the_request_and_all_of_them_to_encode():
    engine = media_engine(max_num_encoder_tokens=100)
    add(engine, images(1))
    scheduled = engine.scheduler.schedule()
    [start], [new] = scheduled.encoder_starts, scheduled.new_requests
    assert start.data.keys() == {"pixel_values", "grid"}
    assert new.mm_features[0].data.keys() == {"grid"}
    assert (new.mm_features[0].offset, new.mm_features[0].identifier) == (2, start.identifier)


# Spans that must be computed in one step.


def test_a_span_is_never_parted_by_chunks():
    engine = media_engine(media=(WHOLE,), max_num_batched_tokens=16, max_num_encoder_tokens=100)
    request = images(1, 2, before=10, length=8, behind=9, max_tokens=1)
    assert_as_expected(engine, run_to_end(engine, request), request)
    assert tokens_by_step(engine) == [[10], [16], [16], [3]]


def test_a_limit_of_prompt_tokens_does_not_part_a_span():
    engine = media_engine(media=(WHOLE,), max_num_encoder_tokens=100, long_prefill_token_threshold=3)
    request = images(1, before=4, length=8, behind=4, max_tokens=1)
    assert_as_expected(engine, run_to_end(engine, request), request)
    assert tokens_by_step(engine) == [[3], [1], [8], [3], [1]]


def test_a_hit_that_ends_in_a_span_is_cut_back_to_its_begin():
    engine = media_engine(media=(WHOLE,), max_num_encoder_tokens=100)
    run_to_end(engine, images(1, before=5, length=8, behind=0, max_tokens=1))  # the third block ends in the span
    request = images(1, before=5, length=8, behind=4, max_tokens=1)
    transcript = run_to_end(engine, request)
    assert_as_expected(engine, transcript, request)
    assert transcript.outputs[request.request_id][0].prefill_stats.num_cached_tokens == 4


def test_a_prompt_that_ends_with_a_span_computes_all_of_it_again():
    engine = media_engine(media=(WHOLE,), max_num_encoder_tokens=100)
    for cached in (0, 4):
        request = images(1, before=4, length=8, behind=0, max_tokens=1)
        transcript = run_to_end(engine, request)
        assert transcript.outputs[request.request_id][0].prefill_stats.num_cached_tokens == cached
        assert_as_expected(engine, transcript, request)


def test_what_a_step_cannot_hold_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 15, but one image may have 16 tokens"):
        media_engine(media=(WHOLE,), max_num_batched_tokens=15)
    media_engine(media=(IMAGE,), max_num_batched_tokens=15)
    assert media_engine(media=(WHOLE,), max_num_batched_tokens=None, executor={"step_tokens": 8}).config.scheduler
    with pytest.raises(ConfigError, match=r"enable_chunked_prefill"):
        media_engine(enable_chunked_prefill=False, max_num_batched_tokens=300)


def test_the_cache_has_room_for_the_largest_item_at_least():
    engine = media_engine(size=3)
    request = images(1, length=16, max_tokens=1)
    assert_as_expected(engine, run_to_end(engine, request), request)
    assert engine.executor.encoder.num_embeds == 16


# Failures of encoding.


def test_an_item_that_cannot_be_encoded_ends_its_requests_alone():
    engine = media_engine(unreadable={identifier_of(1): 2})
    first, second, other, text = images(1), images(2, 1), images(3, max_tokens=2), make_request(5, max_tokens=9)
    transcript = run_to_end(engine, first, second, other, text)
    for request, index in ((first, 0), (second, 1)):
        end = transcript.ends[request.request_id]
        assert end.finish_reason is FinishReason.ERROR
        assert (end.error.code, end.error.reason) == ("INVALID_ARGUMENT", "MEDIA_UNREADABLE")
        assert end.error.field == f"mm_features[{index}]"
        assert "the fake tower cannot read it" in end.error.message
        assert transcript.tokens[request.request_id] == []
    assert_as_expected(engine, transcript, other, text)
    assert_nothing_left(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_nothing_that_came_of_an_unreadable_item_can_be_found(async_scheduling, late):
    unreadable = {identifier_of(1): BLOCKS}
    engine = media_engine(unreadable=unreadable, async_scheduling=async_scheduling, executor={"late": late})
    run_to_end(engine, images(1))
    unreadable.clear()
    request = images(1)
    transcript = run_to_end(engine, request)
    assert_as_expected(engine, transcript, request)
    assert transcript.outputs[request.request_id][0].prefill_stats.num_cached_tokens == 0


def test_an_encoding_without_waiting_requests_is_dropped():
    engine = media_engine()
    add(engine, images(1, request_id="r"), images(1, request_id="s"))
    step(engine, Transcript())
    engine.scheduler.abort_requests(CLIENT, ["r"])
    assert engine.scheduler.stats().media.pending_embeds == 8
    engine.scheduler.abort_requests(CLIENT, ["s"])
    assert engine.scheduler.stats().media.pending_embeds == 0
    request = images(2, max_tokens=1)
    assert_as_expected(engine, run_to_end(engine, request), request)
    assert engine.executor.encoder.encoded == [identifier_of(2)]
    assert engine.executor.encoder.rows.keys() == {identifier_of(2)}


def test_resetting_the_encoder_cache_leaves_what_running_requests_need():
    engine = media_engine(max_num_encoder_tokens=100, max_num_batched_tokens=8)
    control = EngineControl(engine)
    transcript = run_to_end(engine, images(1))
    request = images(2, max_tokens=1)
    add(engine, request)
    step(engine, transcript)  # 6 of 8 of its embeddings
    control.utilities.invoke("reset_encoder_cache", [])
    assert engine.executor.encoder.rows.keys() == {identifier_of(1), identifier_of(2)}
    step(engine, transcript)
    assert engine.executor.encoder.rows.keys() == {identifier_of(2)}
    assert_as_expected(engine, run_to_end(engine, transcript=transcript), request)
    assert engine.executor.encoder.encoded == [identifier_of(1), identifier_of(2)]


def test_nothing_is_there_after_a_sleep():
    resets = []
    inputs = MediaInputs(clear=lambda: resets.append("receiver"))
    engine = media_engine(max_num_encoder_tokens=100, media_inputs=inputs)
    control = EngineControl(engine)
    run_to_end(engine, images(1))
    control.sleep(0)
    control.wake_up()
    assert resets == []
    control.sleep(1)
    assert engine.scheduler.stats().media.encoder_cache_usage == 0
    control.wake_up()
    request = images(1)
    assert_as_expected(engine, run_to_end(engine, request), request)
    assert engine.executor.encoder.encoded == [identifier_of(1)] * 2
    assert resets == ["receiver"]
    control.utilities.invoke("reset_mm_cache", [])
    assert resets == ["receiver"] * 2


def test_a_request_that_loses_its_blocks_finds_its_rows_again():
    engine = media_engine(max_num_encoder_tokens=100, num_blocks=10, prefix_caching=False)
    requests = [images(1, max_tokens=12), images(2, max_tokens=12)]
    assert_as_expected(engine, run_to_end(engine, *requests), *requests)
    assert engine.scheduler.stats().num_preemptions > 0
    assert sorted(engine.executor.encoder.encoded) == [identifier_of(1), identifier_of(2)]


def test_a_step_that_encodes_and_fails_is_tried_again():
    failing = [True, False, True]
    fails = {"fails": lambda scheduled: bool(scheduled.encoder_budget and failing and failing.pop())}
    engine = media_engine(executor=fails)
    requests = [images(1, max_tokens=2), make_request(5, max_tokens=3)]
    assert_as_expected(engine, run_to_end(engine, *requests), *requests)
    assert_nothing_left(engine)
    assert not failing
    assert engine.executor.num_failures == 2


def test_an_engine_whose_every_step_that_encodes_fails_ends():
    engine = media_engine(executor={"fails": lambda scheduled: bool(scheduled.encoder_budget)})
    with pytest.raises(EngineDeadError):
        run_to_end(engine, images(1))


def test_a_request_that_steps_with_its_media_fail_of_ends_alone():
    poison, others = images(1, request_id="poison"), [images(2, max_tokens=4), make_request(5, max_tokens=9)]
    fails = {"fails": lambda step: any(key.startswith("poison") for key in step.num_scheduled_tokens)}
    engine = media_engine(executor=fails, max_num_encoder_tokens=1000)
    transcript = run_to_end(engine, poison, *others)
    assert transcript.ends["poison"].error.reason == "STEP_FAILED"
    assert_as_expected(engine, transcript, *others)


def test_a_text_request_is_blamed_although_steps_between_its_steps_encode_media():
    """The failing step is the third one of the request, so other requests have turns before each retry reaches it."""
    poison = make_request([1] * 30, request_id="poison")
    others = [images(1, max_tokens=4), images(2, max_tokens=4), make_request(5, max_tokens=9)]
    fails = {
        "fails": lambda scheduled: any(scheduled.num_tokens_after.get(key, 0) > 20 for key in _poisoned(scheduled))
    }
    slow = msgspec.structs.replace(IMAGE, num_blocks=40)
    engine = media_engine(media=(slow,), executor=fails, long_prefill_token_threshold=10, prefix_caching=False)
    transcript = run_to_end(engine, poison, *others)
    assert transcript.ends["poison"].error.reason == "STEP_FAILED"
    assert_as_expected(engine, transcript, *others)


def _poisoned(scheduled):
    return [key for key in scheduled.num_scheduled_tokens if key.startswith("poison")]


def test_a_running_request_takes_the_room_that_a_waiting_one_was_to_start_with():
    engine = media_engine(size=16, max_num_seqs=1, max_num_batched_tokens=16)
    waits = images(1, max_tokens=1)
    runs = images(2, before=70, length=16, max_tokens=1)
    transcript = run_to_end(engine, waits, runs)
    assert_as_expected(engine, transcript, waits, runs)
    assert list(transcript.ends) == [runs.request_id, waits.request_id]
    assert engine.executor.encoder.encoded == [identifier_of(number) for number in (1, 2, 1)]


def test_items_of_a_step_that_lost_its_peers_are_encoded_again():
    engine = media_engine(max_num_batched_tokens=8, max_num_encoder_tokens=1000)
    request = images(1, max_tokens=1)
    add(engine, request)
    step(engine, Transcript())  # 6 of 8 of its embeddings
    sample, engine.executor.sample_tokens = engine.executor.sample_tokens, _lose_peers
    with pytest.raises(CollectiveBroken):
        engine.step(lambda: None)
    engine.executor.sample_tokens = sample
    assert_as_expected(engine, run_to_end(engine), request)
    assert engine.executor.encoder.encoded == [identifier_of(1)] * 2


def _lose_peers(grammar=None):
    raise CollectiveBroken("a rank has gone")


def test_a_rank_of_a_group_computes_a_blank_beside_what_it_encodes():
    engine = media_engine()
    add(engine, images(1, max_tokens=1))
    for _ in range(3):
        engine.step_together(lambda: None)
    assert steps_of(engine) == [(0, 8, 1), (0, 8, 0), (13, 8, 0)]
    assert engine.executor.num_dummy_steps == 2


def test_a_loop_goes_on_while_there_is_nothing_but_media_to_compute():
    engine = media_engine()
    sink = StopsAtTheEnd()
    sink.loop = loop = BusyLoop(engine, EngineControl(engine), sink)
    loop.add(CLIENT, request := images(1, 2, max_tokens=2))
    loop.run()
    assert_as_expected(engine, sink.transcript, request)
    assert engine.executor.encoder.encoded == [identifier_of(1), identifier_of(2)]


# Order, fair shares, drafts, and events.


def test_small_items_do_not_keep_a_large_one_waiting():
    engine = media_engine(size=16, max_num_encoder_tokens=1000, max_num_batched_tokens=4, prefix_caching=False)
    large = images(1, length=16, max_tokens=1)
    small = [images(10 + i, length=8, behind=0, max_tokens=6) for i in range(12)]
    transcript = run_to_end(engine, small[0], small[1], large, *small[2:])
    assert_as_expected(engine, transcript, large, *small)
    assert list(transcript.ends).index(large.request_id) <= 4


def test_encoding_counts_for_the_tenants_share():
    engine = media_engine(max_num_encoder_tokens=1000)
    request = prepared(images(1))
    engine.scheduler.add_request(request)
    engine.scheduler.schedule()
    # The prompt's tokens and its embeddings were charged as it started.
    assert (request.num_charged_tokens, request.num_uncharged_embeds) == (13, 0)
    queue = FairQueue(by_priority=False, fair=True)
    requests = [prepared(make_request(5, tenant=tenant)) for tenant in ("a", "b", "b", "b", "a")]
    requests[0].num_uncharged_embeds = 9
    for each in requests:
        queue.add(each)
    order = []
    while queue:
        order.append(queue.peek().context.tenant)
        queue.take(queue.peek())
    assert order == ["a", "b", "b", "b", "a"]  # 14 tokens against 5, 10 and 15


def test_tenants_take_turns_at_being_encoded():
    engine = media_engine()
    many = [images(10 + i, tenant="a", max_tokens=1) for i in range(8)]
    one = images(1, tenant="b", max_tokens=1)
    transcript = run_to_end(engine, *many, one)
    # The first item was already being encoded.
    assert list(transcript.ends).index(one.request_id) <= 2
    assert_as_expected(engine, transcript, *many, one)


def test_under_priority_the_urgent_are_encoded_first():
    engine = media_engine(policy="priority")
    transcript = Transcript()
    later = [images(10 + i, priority=5, max_tokens=1) for i in range(4)]
    add(engine, *later)
    step(engine, transcript)
    run_to_end(engine, urgent := images(1, priority=1, max_tokens=1), transcript=transcript)
    assert list(transcript.ends).index(urgent.request_id) == 1


def test_an_aborted_request_is_charged_for_what_was_encoded():
    engine = media_engine()
    request = prepared(images(1, request_id="r", tenant="a"))
    engine.scheduler.add_request(request)
    engine.scheduler.schedule()
    assert request.num_uncharged_embeds == 8
    engine.scheduler.add_request(prepared(images(2, tenant="b")))
    engine.scheduler.abort_requests(CLIENT, ["r"])
    assert (request.num_charged_tokens, request.num_uncharged_embeds) == (13, 0)


@pytest.mark.parametrize(
    ("method", "drafts"), [("ngram", 3), ("suffix", 3), ("draft_model", 0), ("eagle3", 0), ("mtp", 0)]
)
def test_models_that_draft_read_no_media(method, drafts):
    model = {"model": "/small"} if method in ("draft_model", "eagle3") else {}
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=3, **model)
    engine = media_engine(max_num_encoder_tokens=1000, speculative=speculative)
    add(engine, images(1, request_id="m"), make_request(5, request_id="t"))
    by_key = engine.scheduler._requests.by_key
    assert {request.request_id: request.max_drafts for request in by_key.values()} == {"m": drafts, "t": 3}


def test_a_step_that_encodes_says_nothing_of_what_tokens_cost(monkeypatch):
    engine = media_engine(speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=3))
    took = []
    monkeypatch.setattr(engine.scheduler._drafting._policy.cost, "took", lambda *facts: took.append(facts))
    add(engine, images(1), make_request(5))
    for number in (1, 2, 3):
        scheduled = engine.scheduler.schedule()
        scheduled.encoder_budget = 8 if number == 2 else 0
        keys = list(scheduled.num_scheduled_tokens)
        results = ModelRunnerOutput(request_ids=keys, sampled_token_ids=[[1] for _ in keys], seconds=float(number))
        engine.scheduler.update_from_output(scheduled, results)
    assert [seconds for _, seconds in took] == [1.0, 3.0]


def test_events_tell_which_media_are_in_blocks():
    engine = media_engine(enable_kv_events=True)
    runs = (EmbedRun(0, 2), EmbedRun(3, 1))
    features = [make_feature(1, 2, 6), make_feature(2, 9, 4, embed_runs=runs)]
    run_to_end(engine, make_request(20, mm_features=features, max_tokens=1))
    events = [event for event in engine.scheduler.kv_cache.take_events() if isinstance(event, BlockStored)]
    assert [keys for event in events for keys in event.extra_keys] == [
        [BlockMedia(identifier_of(1), 2)],
        [BlockMedia(identifier_of(1), -2)],
        [BlockMedia(identifier_of(2), 1)],
        [BlockMedia(identifier_of(2), -3)],
        [],
    ]
    run_to_end(engine, make_request(8, max_tokens=1))
    assert [event.extra_keys for event in engine.scheduler.kv_cache.take_events()] == [[]]


# Order in which waiting items are encoded.


def wanted(number, *, length=4, **fields):
    feature = make_feature(number, 0, length)
    return Wanted(prepared(make_request(20, mm_features=[feature], **fields)), feature)


def line_of(*entries, by_priority=False, fair=True):
    line = MediaLine(by_priority=by_priority, fair=fair)
    for arrival, each in enumerate(entries):
        each.request.arrival = arrival
        line.add(each)
    return line


def order(line):
    taken = []
    while line:
        taken += line.take(line.head().feature.identifier)
    return taken


def test_first_come_first_served():
    entries = [wanted(number) for number in (3, 1, 2)]
    assert order(line_of(*entries)) == entries


def test_the_urgent_go_first_under_priority():
    late, soon = wanted(1, priority=5), wanted(2, priority=1)
    assert order(line_of(late, soon, by_priority=True)) == [soon, late]


def test_tenants_take_turns_by_their_embeddings_and_weights():
    large = [wanted(number, length=12, tenant="a") for number in (1, 2)]
    small = [wanted(number, length=4, tenant="b") for number in (3, 4, 5, 6)]
    # After the first item of each tenant, the charged tokens are 12 compared with 4, 8, 12.
    assert order(line_of(*large, *small)) == [large[0], *small[:3], large[1], small[3]]
    assert order(line_of(*large, *small, fair=False)) == [*large, *small]
    heavy = [wanted(number, length=12, tenant="a", tenant_weight=3.0) for number in (1, 2)]
    assert order(line_of(*heavy, *small))[:3] == [heavy[0], small[0], heavy[1]]


def test_those_that_need_the_same_item_leave_together():
    entries = [wanted(1), wanted(2), wanted(1, tenant="b")]
    line = line_of(*entries)
    assert line.take(entries[0].feature.identifier) == [entries[0], entries[2]]
    assert (len(line), list(line)) == (1, [entries[1].request.key])


def test_a_request_that_has_ended_is_waited_for_no_more():
    entries = [wanted(1), wanted(2)]
    line = line_of(*entries)
    line.remove(entries[0].request)
    line.remove(entries[0].request)
    assert order(line) == [entries[1]]
