"""Whisper's rules against transformers' logits processors, through the batch that keeps the requests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_enginecore.core.scheduler.output import NewRequestData, SchedulerOutput
from penstock_enginecore.executor.generation.input_batch import InputBatch
from penstock_enginecore.models.whisper_rules import WhisperRules
from penstock_enginecore.sample.rules import LogitRules, apply_rules
from tests.fakes.models.whisper_processors import processors_of

END, START, LANGUAGE, TASK, PREVIOUS, NO_TIMESTAMPS = 50, 51, 52, 53, 54, 59
BEGIN = NO_TIMESTAMPS + 1
VOCAB = 100
RULES = WhisperRules(
    suppressed=(1, 2, 51, 52, 53),
    suppressed_first=(10, END),
    no_timestamps=NO_TIMESTAMPS,
    max_first_timestamp=5,
    end=END,
    start=START,
    tasks=(TASK,),
)
TIMED = [START, LANGUAGE, TASK]
UNTIMED = [*TIMED, NO_TIMESTAMPS]
SOUND = [0] * 12
GREEDY = SamplingParams(temperature=0.0)


def batch_of(
    requests: Sequence[tuple[list[int], list[int], SamplingParams]], rules: WhisperRules | None = RULES
) -> InputBatch:
    batch = InputBatch(max_model_len=256, block_size=4, num_groups=1, eos_token_ids=frozenset({END}), model_rules=rules)
    for i, (prompt, output, params) in enumerate(requests):
        new = NewRequestData(
            request_id=str(i),
            token_ids=[*prompt, *output],
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            block_ids=([],),
            sampling_params=params,
        )
        batch.update(SchedulerOutput(new_requests=[new]))
    return batch


def rules_of(prompt: list[int], output: list[int], params: SamplingParams = GREEDY, **fields: Any) -> LogitRules:
    return batch_of([(prompt, output, params)], **fields).rules_of(["0"])


def processed(prompt: list[int], output: list[int], logits: torch.Tensor, *, timed: bool) -> torch.Tensor:
    """Return ``logits`` ``[vocab]`` after the processors that transformers' Whisper makes for a request."""
    made = processors_of(RULES, len(prompt), timed=timed)
    return made(torch.tensor([[*prompt, *output]]), logits[None].clone())[0]


def history(random: np.random.Generator) -> list[int]:
    """Return random output tokens, many of which are timestamps."""
    length = int(random.integers(0, 9))
    kinds = random.integers(0, 3, length)
    return [int(random.integers(BEGIN, VOCAB) if kind else random.integers(0, NO_TIMESTAMPS)) for kind in kinds]


@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
def test_logits_equal_those_of_transformers_to_the_last_bit(scale: float) -> None:
    random = np.random.default_rng(7)
    kinds = set()
    for step in range(60):
        requests = [
            (
                [*SOUND, *([PREVIOUS, *history(random)] if random.random() < 0.5 else []), *prompt],
                history(random),
                GREEDY,
            )
            for prompt in (TIMED, UNTIMED) * 10
        ]
        if step % 2:  # a request without these rules, before the other requests
            requests.insert(0, (TIMED, [], SamplingParams(temperature=0.0, allowed_token_ids=(3,))))
        logits = torch.from_numpy(random.normal(scale=scale, size=(len(requests), VOCAB)).astype(np.float32))
        logits[::3, BEGIN:] += float(random.normal()) * scale
        rules = batch_of(requests).rules_of([str(i) for i in range(len(requests))])
        ours = logits.clone()
        apply_rules(ours, rules)
        assert rules.whisper is not None
        kinds.update(rules.whisper.kinds.tolist())
        for row, (prompt, output, params) in enumerate(requests):
            if params.allowed_token_ids:
                assert ours[row].isfinite().nonzero().tolist() == [[3]]
                continue
            theirs = processed(prompt, output, logits[row], timed=prompt[-1] == TASK)
            assert torch.equal(ours[row], theirs), (step, prompt, output)
    assert kinds == set(range(6))


def allowed(prompt: list[int], output: list[int], likely: Sequence[int] = (), **fields: Any) -> set[int]:
    """Return the tokens that may follow. The tokens ``likely`` are much likelier than others."""
    logits = torch.zeros(1, VOCAB)
    logits[0, list(likely)] = 20.0
    apply_rules(logits, rules_of(prompt, output, **fields))
    return set(np.flatnonzero(torch.isfinite(logits[0]).numpy()).tolist())


TEXT = set(range(END)) - {1, 2}
SPECIAL = set(range(END, NO_TIMESTAMPS)) - set(RULES.suppressed)
TIMES = set(range(BEGIN, VOCAB))


@pytest.mark.parametrize(
    ("output", "likely", "expected"),
    [
        ([], [10], set(range(BEGIN, BEGIN + 6))),  # the first token is an early timestamp, whatever is likely
        ([BEGIN + 2], [10], TEXT | SPECIAL),  # text follows the first timestamp
        ([BEGIN + 2, 7], [10], TEXT | SPECIAL | set(range(BEGIN + 3, VOCAB))),  # no timestamp repeats without a pair
        ([BEGIN + 2, 7], [], set(range(BEGIN + 3, VOCAB))),  # timestamps together are likelier than each text token
        ([BEGIN + 2, 7, BEGIN + 9], [10], set(range(BEGIN + 9, VOCAB))),  # a pair may repeat its timestamp
        ([BEGIN + 2, 7, BEGIN + 9], [END], SPECIAL | set(range(BEGIN + 9, VOCAB))),  # the end may follow one timestamp
        ([BEGIN + 2, 7, BEGIN + 9, BEGIN + 9], [10], TEXT | SPECIAL),  # text follows a pair
        ([BEGIN + 2, 7, BEGIN + 9, BEGIN + 9, 8], [10], TEXT | SPECIAL | set(range(BEGIN + 10, VOCAB))),
        ([BEGIN + 39, 7], [10], TEXT | SPECIAL),  # no timestamp is left after the last one
        ([7], [10], TEXT | SPECIAL | TIMES),  # a resumed output without timestamps
    ],
)
def test_timestamps_come_in_pairs_and_never_decrease(output: list[int], likely: list[int], expected: set[int]) -> None:
    assert allowed(TIMED, output, likely) == expected


@pytest.mark.parametrize(
    ("prompt", "timed"),
    [
        (TIMED, True),
        ([PREVIOUS, 5, NO_TIMESTAMPS, *TIMED], True),
        ([*TIMED, BEGIN + 3], True),
        (UNTIMED, False),
        ([*UNTIMED, 7, 8], False),
        ([START], False),
        ([START, LANGUAGE], False),
        ([5, 6], False),
        ([*TIMED, START], False),
    ],
)
def test_prompts_choose_timestamps(prompt: list[int], timed: bool) -> None:
    rules = rules_of([*SOUND, *prompt], []).whisper
    assert rules is not None
    assert rules.any_timed == timed


def test_prompts_of_english_only_checkpoints_have_no_task() -> None:
    english = WhisperRules(no_timestamps=NO_TIMESTAMPS, end=END, start=START, multilingual=False)
    for prompt, timed in (([START], True), ([START, NO_TIMESTAMPS], False)):
        found = rules_of(prompt, [], rules=english).whisper
        assert found is not None
        assert found.any_timed == timed
    unnamed = WhisperRules(no_timestamps=NO_TIMESTAMPS, end=END, start=START)
    assert [unnamed.times(np.array(prompt)) for prompt in ([START], TIMED)] == [False, True]


@pytest.mark.parametrize(
    "params", [{"allowed_token_ids": (LANGUAGE, 55)}, {"structured_output": StructuredOutput(regex="a")}]
)
def test_constraints_of_a_request_replace_the_rules_of_the_model(params: dict[str, Any]) -> None:
    assert rules_of(TIMED, [], SamplingParams(temperature=0.0, **params)).whisper is None


def test_models_without_rules_cost_nothing() -> None:
    batch = batch_of([(TIMED, [], GREEDY)], None)
    assert not batch.ruled(["0"])
    assert not batch.rules_of(["0"])


def test_only_timestamps_wait_for_tokens_that_the_host_does_not_know() -> None:
    batch = batch_of([(TIMED, [], GREEDY), (UNTIMED, [], GREEDY)])
    for key, waits in (("0", True), ("1", False)):
        expected = batch.expect_tokens([key])
        assert batch.awaits_output([key]) == waits
        batch.take_tokens(expected, np.array([BEGIN if waits else 7], np.int32))
        assert not batch.awaits_output([key])
    assert batch.rules_of(["0"]).whisper.kinds.tolist() == [5]
    assert batch.rules_of(["1"]).whisper.kinds.tolist() == [0]


def test_rules_continue_after_preemption_and_after_resumption_elsewhere() -> None:
    output = [BEGIN + 2, 7, BEGIN + 9, BEGIN + 9, 8]
    whole = rules_of([*SOUND, *TIMED], output).whisper
    step = batch_of([([*SOUND, *TIMED], [], GREEDY)])
    for token in output:
        step.append_tokens(["0"], np.array([token]))
    grown = step.rules_of(["0"]).whisper
    assert whole is not None
    assert grown is not None
    assert (whole.kinds.tolist(), whole.least.tolist()) == (grown.kinds.tolist(), grown.least.tolist())


def test_whispers_rules_follow_other_rules() -> None:
    params = SamplingParams(
        temperature=0.0, logit_bias={10: 50.0, BEGIN + 20: 60.0}, bad_word_token_ids=((BEGIN + 4,),)
    )
    logits = torch.zeros(1, VOCAB)
    apply_rules(logits, rules_of(TIMED, [BEGIN + 2, 7], params))
    assert int(logits.argmax()) == BEGIN + 20
    assert not torch.isfinite(logits[0, : BEGIN + 3]).any(), "the timestamp with the bias is likelier than the text"
    assert not torch.isfinite(logits[0, BEGIN + 4])
