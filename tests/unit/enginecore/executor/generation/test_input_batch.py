"""The persistent batch: a step's inputs as requests join, grow, leave and return."""

import numpy as np
import pytest
import torch

from penstock_common.types.media import EmbedRun, MultiModalFeature
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from penstock_enginecore.executor.generation.input_batch import InputBatch
from penstock_enginecore.lora.adapter import LoraSegment
from penstock_enginecore.lora.core.request import LoraRequest
from penstock_enginecore.sample.sampler import TorchSampler

GREEDY = SamplingParams(temperature=0.0)
EOS = 9


def make_batch() -> InputBatch:
    return InputBatch(max_model_len=64, block_size=4, num_groups=1, eos_token_ids=frozenset({EOS}))


def new(
    request_id: str,
    token_ids: list[int],
    block_ids: list[int],
    *,
    prompt: int | None = None,
    computed: int = 0,
    params: SamplingParams = GREEDY,
    digest: bytes = b"",
) -> NewRequestData:
    return NewRequestData(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if prompt is None else prompt,
        num_computed_tokens=computed,
        block_ids=(block_ids,),
        sampling_params=params,
        lora=LoraRequest("name", "/path", digest) if digest else None,
    )


def test_requests_are_laid_out_one_after_the_other_in_the_scheduled_order() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [10, 11, 12, 13, 14, 15], [5, 3]), new("b", [20, 21], [8])]))
    step = batch.prepare({"b": 2, "a": 6})
    assert step.request_ids == ["b", "a"]
    assert step.token_ids.tolist() == [20, 21, 10, 11, 12, 13, 14, 15]
    assert step.positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    attention = step.attention[0]
    assert attention.query_start_loc.tolist() == [0, 2, 8]
    assert attention.seq_lens.tolist() == [2, 6]
    assert attention.block_table.tolist() == [[8, 0], [5, 3]]
    assert attention.slot_mapping.tolist() == [32, 33, 20, 21, 22, 23, 12, 13]
    assert step.sampling_requests.tolist() == [0, 1]
    assert step.logits_indices.tolist() == [1, 7]


def test_requests_with_adapters_come_last_by_digest_and_their_tokens_are_told_of() -> None:
    batch = make_batch()
    adapters = {"a": b"B", "b": b"", "c": b"A", "d": b"B", "e": b""}
    news = [new(key, [ord(key)] * 3, [place + 1], digest=adapters[key]) for place, key in enumerate(adapters)]
    batch.update(SchedulerOutput(new_requests=news))
    step = batch.prepare({"a": 3, "b": 2, "c": 1, "d": 2, "e": 3})
    assert step.request_ids == ["b", "e", "c", "a", "d"]
    assert bytes(step.token_ids.tolist()) == b"bbeeecaaadd"
    assert step.segments == (LoraSegment(b"A", 5, 6), LoraSegment(b"B", 6, 11))
    assert step.sampling_requests.tolist() == [1, 3]
    assert batch.prepare({"e": 1, "b": 1}).segments == ()
    batch.update(SchedulerOutput(finished_request_ids=["a", "d"]))
    assert batch.prepare({"c": 1, "e": 1}).segments == (LoraSegment(b"A", 1, 2),)


def test_drafts_belong_to_the_segment_of_their_request() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2], [2, 3], digest=b"A"), new("b", [3], [4])]))
    step = batch.prepare({"a": 5, "b": 1}, {"a": [7, 8, 9]})
    assert step.token_ids.tolist() == [3, 1, 2, 7, 8, 9]
    assert step.segments == (LoraSegment(b"A", 1, 6),)
    assert step.drafts == [[], [7, 8, 9]]


def test_a_chunk_that_does_not_reach_the_end_samples_nothing() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2, 3, 4, 5], [2, 3]), new("b", [6], [4])]))
    step = batch.prepare({"a": 3, "b": 1})
    assert step.sampling_requests.tolist() == [1]
    assert step.logits_indices.tolist() == [3]


def test_sampled_tokens_are_the_next_inputs_and_new_blocks_extend_the_table() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2, 3, 4], [2])]))
    batch.prepare({"a": 4})
    batch.append_tokens(["a"], np.array([77]))
    batch.update(
        SchedulerOutput(
            cached_requests=CachedRequestData(request_ids=["a"], num_computed_tokens=[4], new_block_ids=[([6],)])
        )
    )
    step = batch.prepare({"a": 1})
    assert step.token_ids.tolist() == [77]
    assert step.positions.tolist() == [4]
    assert step.attention[0].slot_mapping.tolist() == [24]
    assert step.attention[0].block_table.tolist() == [[2, 6]]
    assert step.sampling_requests.tolist() == [0]


def test_cached_prefix_tokens_are_not_computed_again() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2, 3, 4, 5, 6], [2, 3], computed=4)]))
    step = batch.prepare({"a": 2})
    assert step.token_ids.tolist() == [5, 6]
    assert step.attention[0].seq_lens.tolist() == [6]


def test_a_preempted_request_comes_back_with_its_output() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2], [2]), new("b", [3], [4])]))
    batch.append_tokens(["a", "b"], np.array([50, 60]))
    batch.update(SchedulerOutput(preempted_request_ids=["a"]))
    assert len(batch) == 1
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2, 50], [7], prompt=2)]))
    step = batch.prepare({"a": 3})
    assert step.token_ids.tolist() == [1, 2, 50]
    assert step.attention[0].slot_mapping.tolist() == [28, 29, 30]


def test_a_reused_row_keeps_nothing_of_the_request_before() -> None:
    batch = make_batch()
    before = SamplingParams(temperature=2.0, top_k=3, top_p=0.5, min_p=0.1, seed=7, min_tokens=5, stop_token_ids=(1,))
    batch.update(SchedulerOutput(new_requests=[new("a", list(range(20)), [2, 3, 4, 5, 6], params=before)]))
    batch.update(SchedulerOutput(finished_request_ids=["a"], new_requests=[new("b", [30], [9])]))
    assert len(batch) == 1
    step = batch.prepare({"b": 1})
    assert step.attention[0].block_table.tolist() == [[9]]
    sampling = batch.sampling_inputs(["b"])
    assert sampling.settings.temperature.tolist() == [0.0]
    assert sampling.settings.top_k.tolist() == [0]
    assert sampling.settings.top_p.tolist() == [1.0]
    assert sampling.settings.min_p.tolist() == [0.0]
    assert not sampling.rules


def test_the_batch_grows_past_its_first_rows() -> None:
    batch = make_batch()
    ids = [f"r{i}" for i in range(50)]
    batch.update(SchedulerOutput(new_requests=[new(r, [100 + i, i], [i + 1]) for i, r in enumerate(ids)]))
    step = batch.prepare(dict.fromkeys(reversed(ids), 2))
    assert step.token_ids.tolist() == [token for i in reversed(range(50)) for token in (100 + i, i)]


def test_draws_are_indexed_by_output_token_even_after_preemption() -> None:
    params = SamplingParams(seed=2**64 - 1)
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2, 3], [2], params=params)]))
    first = batch.sampling_inputs(["a"]).uniforms
    batch.append_tokens(["a"], np.array([50]))
    second = batch.sampling_inputs(["a"]).uniforms
    resumed = make_batch()
    resumed.update(SchedulerOutput(new_requests=[new("a", [1, 2, 3, 50], [2], prompt=3, params=params)]))
    assert resumed.sampling_inputs(["a"]).uniforms == second
    assert first != second


def test_draws_of_several_places_are_those_of_the_steps_that_come() -> None:
    batch = make_batch()
    added = [
        new("a", [1, 2, 3], [2], params=SamplingParams(seed=7)),
        new("b", [4, 5], [3], prompt=1, params=SamplingParams(seed=8)),
        new("c", [6], [4]),
    ]
    batch.update(SchedulerOutput(new_requests=added))
    drawn = batch.draws_of(["a", "b"] * 3, np.repeat(np.arange(3), 2)).uniforms.reshape(3, 2)
    mixed = batch.draws_of(["c", "b", "c"], np.array([0, 2, 1]))
    assert not batch.draws_of(["c"], 1).uniforms.any()
    for place in range(3):
        assert batch.draws_of(["a", "b"], place).uniforms.tolist() == drawn[place].tolist()
    assert mixed.settings.temperature.tolist() == [0.0, 1.0, 0.0]
    assert mixed.uniforms[1] == drawn[2, 1]
    for place in range(3):
        assert batch.sampling_inputs(["a", "b"]).uniforms.tolist() == drawn[place].tolist()
        batch.append_tokens(["a", "b"], np.array([50, 51]))


@pytest.mark.parametrize(("ignore_eos", "banned"), [(False, [3, EOS]), (True, [3])])
def test_min_tokens_bans_what_would_end_the_request_until_it_is_reached(ignore_eos: bool, banned: list[int]) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3,), ignore_eos=ignore_eos)
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("x", [1], [2]), new("a", [1], [3], params=params)]))
    rules = batch.sampling_inputs(["x", "a"]).rules
    assert rules.banned is not None
    assert list(zip(rules.banned.rows, rules.banned.token_ids, strict=True)) == [(1, token_id) for token_id in banned]
    batch.append_tokens(["a"], np.array([5]))
    batch.append_tokens(["a"], np.array([5]))
    assert not batch.sampling_inputs(["x", "a"]).rules


def test_the_last_token_of_a_full_sequence_has_no_place_and_needs_none() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", list(range(64)), list(range(1, 17)))]))
    batch.append_tokens(["a"], np.array([5]))
    assert batch.prepare({"a": 64}).token_ids.tolist() == list(range(64))


def test_numbers_beyond_64_bits_do_not_break_the_batch() -> None:
    params = SamplingParams(seed=2**64 - 1, top_k=2**70, min_tokens=2**70)
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1], [2], params=params)]))
    assert batch.sampling_inputs(["a"]).settings.top_k[0] == 2**63 - 1


def test_a_request_that_draws_needs_a_seed() -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match="seed is unset"):
        batch.update(SchedulerOutput(new_requests=[new("a", [1], [2], params=SamplingParams(temperature=1.0))]))


def test_a_request_cannot_be_added_twice() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1], [2])]))
    with pytest.raises(ValueError, match="'a' is already in the batch"):
        batch.update(SchedulerOutput(new_requests=[new("a", [1], [2])]))


def test_a_token_that_is_not_known_yet_is_named_by_its_row() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2], [2]), new("b", [6, 7], [4])]))
    first = batch.prepare({"a": 2, "b": 2})
    assert not len(first.unknown)
    expected = batch.expect_tokens(["a", "b"])
    cached = CachedRequestData(request_ids=["b", "a"], num_computed_tokens=[2, 2], new_block_ids=[None, None])
    batch.update(SchedulerOutput(cached_requests=cached))
    step = batch.prepare({"b": 1, "a": 1})
    assert step.token_ids.tolist() == [0, 0]
    assert step.positions.tolist() == [2, 2]
    assert step.unknown.tolist() == [0, 1]
    assert step.unknown_rows.tolist() == expected.rows[::-1].tolist()
    assert step.sampling_requests.tolist() == [0, 1]
    batch.take_tokens(expected, np.array([30, 40], dtype=np.int32))
    again = batch.prepare({"b": 1, "a": 1})
    assert again.token_ids.tolist() == [40, 30]
    assert not len(again.unknown)


def test_ids_at_embeddings_of_media_are_zeros_and_count_as_no_tokens() -> None:
    batch = make_batch()
    request = new("a", [5, 10**6, 7, 10**6], [1], params=SamplingParams(temperature=0.0, repetition_penalty=2.0))
    runs = (EmbedRun(0, 1), EmbedRun(2, 1))
    request.mm_features = [MultiModalFeature(modality="image", identifier="i", offset=1, length=3, embed_runs=runs)]
    batch.update(SchedulerOutput(new_requests=[request]))
    assert batch.prepare({"a": 4}).token_ids.tolist() == [5, 0, 7, 0]
    logits = torch.zeros(1, 10)
    logits[0, [0, 5, 7]] = torch.tensor([1.0, 1.5, 1.5])
    assert TorchSampler().sample(logits, batch.sampling_inputs(["a"])).token_ids.tolist() == [0]


def test_a_token_of_a_row_that_is_anothers_by_now_is_dropped() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2], [2])]))
    expected = batch.expect_tokens(["a"])
    batch.update(SchedulerOutput(finished_request_ids=["a"], new_requests=[new("b", [6, 7, 8, 9], [4])]))
    batch.take_tokens(expected, np.array([30], dtype=np.int32))
    assert batch.prepare({"b": 4}).token_ids.tolist() == [6, 7, 8, 9]


def test_a_token_behind_the_last_position_is_not_kept() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", list(range(64)), list(range(1, 17)))]))
    expected = batch.expect_tokens(["a"])
    batch.take_tokens(expected, np.array([30], dtype=np.int32))
    assert batch.prepare({"a": 64}).token_ids.tolist() == list(range(64))


def test_draws_are_those_of_the_next_token() -> None:
    batch = make_batch()
    drawn = SamplingParams(temperature=1.0, seed=5, top_p=0.5, top_k=3, min_p=0.1, presence_penalty=1.0)
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2], [2]), new("b", [6, 7], [4], params=drawn)]))
    draws = batch.draws(["a", "b"])
    batch.expect_tokens(["a", "b"])
    later = batch.draws(["a", "b"])
    assert (draws.output_indices.tolist(), later.output_indices.tolist()) == ([0, 0], [1, 1])
    assert draws.seeds.tolist() == [0, 5]
    assert (draws.any_drawn, draws.any_filtered) == (True, True)


SEQUENCE = SamplingParams(temperature=0.0, bad_word_token_ids=((3, 4),))
PENALIZED = SamplingParams(temperature=0.0, presence_penalty=1.0)


@pytest.mark.parametrize(
    ("params", "ruled", "reads"),
    [
        (GREEDY, False, False),
        (SamplingParams(temperature=0.0, logprobs=0), False, False),
        (PENALIZED, True, True),
        (SEQUENCE, True, True),
        (SamplingParams(temperature=0.0, bad_word_token_ids=((3,),)), True, False),
        (SamplingParams(temperature=0.0, logit_bias={3: 1.0}), True, False),
        (SamplingParams(temperature=0.0, min_tokens=2), True, False),
    ],
    ids=str,
)
def test_only_rules_about_tokens_wait_for_the_requests_own_tokens(
    params: SamplingParams, ruled: bool, reads: bool
) -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2], [2]), new("b", [6, 7], [4], params=params)]))
    assert batch.ruled(["a", "b"]) == [1] * ruled
    of_other = batch.expect_tokens(["a"])
    assert not batch.awaits_output(["a", "b"])
    own = batch.expect_tokens(["b"])
    assert batch.awaits_output(["a", "b"]) is reads
    assert not batch.awaits_output(["a"])
    batch.take_tokens(of_other, np.array([8], dtype=np.int32))
    assert batch.awaits_output(["b"]) is reads
    batch.take_tokens(own, np.array([3], dtype=np.int32))
    assert not batch.awaits_output(["b"])


def test_tokens_that_arrive_late_count_for_penalties() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2], [2], params=PENALIZED)]))
    first, second = batch.expect_tokens(["a"]), batch.expect_tokens(["a"])
    for expected, token in ((first, 8), (second, 5)):
        batch.take_tokens(expected, np.array([token], dtype=np.int32))
    penalties = batch.rules_of(["a"]).penalties
    assert penalties is not None
    assert penalties.token_ids.tolist() == [8, 5]


def test_late_tokens_of_a_preempted_request_do_not_count_for_the_resumed_one() -> None:
    batch = make_batch()
    batch.update(SchedulerOutput(new_requests=[new("a", [1, 2], [2], params=PENALIZED)]))
    before = batch.expect_tokens(["a"])
    resumed = new("a", [1, 2, 7], [3], prompt=2, params=PENALIZED)
    batch.update(SchedulerOutput(preempted_request_ids=["a"], new_requests=[resumed]))
    batch.take_tokens(before, np.array([8], dtype=np.int32))
    penalties = batch.rules_of(["a"]).penalties
    assert penalties is not None
    assert penalties.token_ids.tolist() == [7]
