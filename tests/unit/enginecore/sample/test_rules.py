"""Logit rules against the oracle in plain Python, through the batch that keeps their state."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.scheduler.output import GrammarBitmask, NewRequestData, SchedulerOutput
from penstock_enginecore.executor.generation.input_batch import InputBatch
from penstock_enginecore.sample.rules import apply_rules
from penstock_enginecore.sample.sampler import TorchSampler
from penstock_enginecore.structured_output.core.reasoning import ReasoningBudget
from tests.fakes.engines.sampling_oracle import filtered_distribution, ruled_logits

sample = TorchSampler().sample

VOCAB = 40
EOS = 7
tokens = st.integers(0, VOCAB - 1)
token_lists = st.lists(tokens, max_size=12)


def add(
    batch: InputBatch,
    request_id: str,
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
    budget: ReasoningBudget | None = None,
) -> None:
    new = NewRequestData(
        request_id=request_id,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=([],),
        sampling_params=params,
        reasoning_budget=budget,
    )
    batch.update(SchedulerOutput(new_requests=[new]))


def make_batch() -> InputBatch:
    return InputBatch(max_model_len=64, block_size=4, num_groups=1, eos_token_ids=frozenset({EOS}))


def bitmask(*allowed: set[int]) -> np.ndarray:
    """Return a bitmask with one row per set."""
    words = np.zeros((len(allowed), -(-VOCAB // 32)), dtype=np.uint32)
    for row, ids in enumerate(allowed):
        for token_id in ids:
            words[row, token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.view(np.int32)


def distinct_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


rule_sets = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.floats(0.1, 5),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(tokens, st.floats(-100, 100), max_size=5),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=20).map(tuple),
        "bad_word_token_ids": st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "min_tokens": st.integers(0, 14),
        "stop_token_ids": st.lists(tokens, max_size=2).map(tuple),
        "ignore_eos": st.booleans(),
    },
)


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(st.tuples(rule_sets, token_lists.filter(bool), token_lists), min_size=1, max_size=4),
    grammar=st.none() | st.sets(tokens, min_size=1),
    resumed=st.booleans(),
)
def test_rules_do_what_the_oracle_says_in_every_row(
    requests: list[tuple[dict[str, Any], list[int], list[int]]], grammar: set[int] | None, resumed: bool
) -> None:
    batch = make_batch()
    ids = [f"r{i}" for i in range(len(requests))]
    for request_id, (rules, prompt, output) in zip(ids, requests, strict=True):
        params = SamplingParams(temperature=0.0, **rules)
        add(batch, request_id, prompt, output if resumed else [], params)
        for token_id in () if resumed else output:
            batch.append_tokens([request_id], np.array([token_id]))
    # Only the last request is constrained.
    mask = None if grammar is None else GrammarBitmask([ids[-1]], bitmask(grammar))
    logits = distinct_logits(len(requests))
    expected = [
        ruled_logits(
            logits[i].tolist(),
            SamplingParams(**rules),
            prompt,
            output,
            eos_token_ids={EOS},
            grammar=grammar if i == len(requests) - 1 else None,
        )
        for i, (rules, prompt, output) in enumerate(requests)
    ]
    apply_rules(logits, batch.sampling_inputs(ids, mask).rules)
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-4)


def test_every_row_may_have_a_grammar_of_its_own() -> None:
    batch = make_batch()
    for request_id in "abc":
        add(batch, request_id, [1], [], SamplingParams(temperature=0.0))
    mask = GrammarBitmask(["c", "a", "b"], bitmask({3}, {39}, {31, 32}))
    logits = distinct_logits(3)
    logits[1, 32] = 50
    inputs = batch.sampling_inputs(["a", "b", "c"], mask)
    assert sample(logits, inputs).token_ids.tolist() == [39, 32, 3]


def test_a_batch_without_rules_has_none() -> None:
    batch = make_batch()
    add(batch, "a", [1], [2], SamplingParams(temperature=0.0, stop_token_ids=(3,), stop=("x",)))
    assert not batch.sampling_inputs(["a"]).rules
    assert not batch.sampling_inputs(["a"], GrammarBitmask([], bitmask())).rules


def test_a_bad_word_that_begins_in_the_prompt_is_not_banned() -> None:
    params = SamplingParams(temperature=0.0, bad_word_token_ids=((5, 6),))
    logits = torch.zeros(1, VOCAB)
    logits[0, 6] = 1
    for prompt, output, chosen in (([5], [], 6), ([1], [5], 0)):
        batch = make_batch()
        add(batch, "a", prompt, output, params)
        assert sample(logits.clone(), batch.sampling_inputs(["a"])).token_ids.tolist() == [chosen]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_give_way_where_a_grammar_leaves_nothing_else(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=0, min_tokens=5, bad_word_token_ids=((3,),))
    batch = make_batch()
    add(batch, "a", [1], [], params)
    add(batch, "b", [1], [], params)
    logits = distinct_logits(2)
    logits[1, [3, EOS]] = 100.0
    mask = GrammarBitmask(["a"], bitmask({EOS}))
    chosen = sample(logits, batch.sampling_inputs(["a", "b"], mask)).token_ids
    assert chosen[0] == EOS
    assert chosen[1] not in (3, EOS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_leave_no_token_still_give_one(temperature: float) -> None:
    batch = make_batch()
    add(batch, "a", [1], [], SamplingParams(temperature=temperature, seed=0, allowed_token_ids=(4,)))
    mask = GrammarBitmask(["a"], bitmask({5}))
    sampled = sample(distinct_logits(), batch.sampling_inputs(["a"], mask))
    assert 0 <= sampled.token_ids[0] < VOCAB
    assert sampled.num_nans is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_wrong_logits_are_found_beside_rules(temperature: float, value: float) -> None:
    batch = make_batch()
    add(batch, "a", [1], [], SamplingParams(temperature=temperature, seed=0, presence_penalty=1.0))
    add(batch, "b", [1], [], SamplingParams(temperature=temperature, seed=0))
    rows = distinct_logits(2)
    rows[:] = torch.where(torch.tensor([[True], [False]]), torch.tensor(value), rows)
    num_nans = sample(rows, batch.sampling_inputs(["a", "b"], GrammarBitmask(["a"], bitmask({5, 6})))).num_nans
    assert num_nans is not None
    assert num_nans[0] > 0
    assert num_nans[1] == 0


def test_a_penalty_that_makes_infinity_of_finite_logits_is_no_fault_of_the_model() -> None:
    batch = make_batch()
    add(batch, "a", [1], [3], SamplingParams(temperature=0.0, repetition_penalty=1e-45))
    rows = torch.full((1, VOCAB), 2.0)
    sampled = sample(rows, batch.sampling_inputs(["a"]))
    assert rows.max() == torch.inf
    assert sampled.num_nans is None


def test_the_rows_of_rules_are_those_that_have_one() -> None:
    batch = make_batch()
    add(batch, "a", [1], [], SamplingParams(seed=0))
    add(batch, "b", [1], [], SamplingParams(seed=0, allowed_token_ids=(4,)))
    add(batch, "c", [1], [], SamplingParams(seed=0, repetition_penalty=1.3))
    rules = batch.sampling_inputs(["a", "b", "c"], GrammarBitmask(["b"], bitmask({5}))).rules
    assert set(rules.rows.tolist()) == {1, 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rules_of_half_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, VOCAB, dtype=dtype)
    logits[0, 3:5] = 40.0
    batch = make_batch()
    add(batch, "a", [1], [], SamplingParams(temperature=0.0, logit_bias={4: 0.001}))
    assert sample(logits, batch.sampling_inputs(["a"])).token_ids.tolist() == [4]


DISTRIBUTIONS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.6, "top_k": 12},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"logit_bias": {3: 2.5, 12: -100.0, 20: 1.0}},
    {"allowed_token_ids": (1, 5, 8, 13, 21, 34)},
    {"bad_word_token_ids": ((2,), (5, 8, 4), (9, 11))},
    {"min_tokens": 10, "stop_token_ids": (1, 2)},
    {"grammar": set(range(0, VOCAB, 3))},
    {"grammar": set(range(0, VOCAB, 2)), "top_k": 9, "temperature": 1.3},
    {
        "temperature": 1.4,
        "top_p": 0.9,
        "top_k": 25,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.4,
        "logit_bias": {3: 1.5},
        "bad_word_token_ids": ((2,), (8, 4)),
        "min_tokens": 10,
    },
]


@pytest.mark.parametrize("case", DISTRIBUTIONS, ids=lambda case: "-".join(case))
def test_draws_follow_the_distribution_that_the_parameters_describe(case: dict[str, Any]) -> None:
    prompt, output, num_draws = [3, 9, 12, 12, 30], [5, 8, 20, 5, 8], 4000
    rules = {k: v for k, v in case.items() if k != "grammar"}
    grammar: set[int] | None = case.get("grammar")
    logits = distinct_logits(seed=4)
    ruled = ruled_logits(
        logits[0].tolist(), SamplingParams(**rules), prompt, output, eos_token_ids={EOS}, grammar=grammar
    )
    expected = np.array(filtered_distribution(ruled, SamplingParams(**rules))) * num_draws
    batch = make_batch()
    ids = [f"r{i}" for i in range(num_draws)]
    for seed, request_id in enumerate(ids):
        add(batch, request_id, prompt, output, SamplingParams(seed=seed, **rules))
    mask = None if grammar is None else GrammarBitmask(ids, np.repeat(bitmask(grammar), num_draws, axis=0))
    chosen = sample(logits.expand(num_draws, -1).clone(), batch.sampling_inputs(ids, mask)).token_ids
    counts = np.bincount(chosen, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    rest_counts, rest_expected = counts[~common].sum(), expected[~common].sum()
    chi_square = ((counts - expected)[common] ** 2 / expected[common]).sum()
    chi_square += (rest_counts - rest_expected) ** 2 / max(rest_expected, 1e-9)
    assert chi_square < critical_value(int(common.sum()))


def critical_value(degrees: int) -> float:
    """Return the value that chi-square exceeds with probability 1e-4, after Wilson and Hilferty."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_at_its_budget_reasoning_must_end_despite_other_rules(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        seed=0,
        top_k=1,
        min_tokens=9,
        stop_token_ids=(3,),
        allowed_token_ids=(4, 5, 6),
        bad_word_token_ids=((3,),),
        logit_bias={3: -100.0},
        presence_penalty=2.0,
    )
    budget = ReasoningBudget(limit=2, begin_token_id=2, end_token_id=3, begun=True)
    for output, ends in (([4], False), ([4, 5], True), ([4, 5, 3], False)):
        batch = make_batch()
        add(batch, "a", [1], output, params, budget)
        add(batch, "b", [1], output, params)
        chosen = sample(distinct_logits(2), batch.sampling_inputs(["a", "b"])).token_ids.tolist()
        assert (chosen[0] == 3) is ends
        assert chosen[1] in (4, 5, 6)


def test_a_budget_alone_is_a_rule() -> None:
    batch = make_batch()
    budget = ReasoningBudget(limit=2, begin_token_id=2, end_token_id=3, begun=True)
    add(batch, "a", [1], [], SamplingParams(temperature=0.0), budget)
    assert batch.ruled(["a"]) == [0]
