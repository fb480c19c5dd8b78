"""The failure matrix detects lost, repeated and changed tokens, and missing or repeated ends."""

import itertools
from collections.abc import Sequence

import pytest

from penstock.common.v1 import finish_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import Unavailable
from tests.fakes.engines.fake_engine import logprobs_of
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.systems.matrix.shapes import LENGTH, Shape, plain, shapes
from tests.fakes.systems.matrix.verdicts import judge


def asked(kind: str, name: str = "plain") -> Shape:
    return next(shape for shape in shapes(6, [(kind, 1)], every=True) if shape.name.startswith(name))


def messages(shape: Shape) -> list[pb.GenerateResponse]:
    """Return a correct stream of deltas with one token each."""
    [expected] = shape.expected
    found = [pb.GenerateResponse(token_ids=[token], text=byte_level().decode([token])) for token in expected.token_ids]
    if expected.logprobs:
        for message in found:
            message.logprobs.CopyFrom(logprobs_of(message.token_ids, 2))
        prompt = byte_level().encode(shape.request.text).ids
        found[0].prompt_logprobs.CopyFrom(logprobs_of(prompt[1:], 1))
    found[-1].finish_reason = finish_pb2.FINISH_REASON_LENGTH
    found[-1].usage.prompt_tokens = expected.prompt_tokens
    found[-1].usage.completion_tokens = expected.completion_tokens
    return found


def verdict(shape: Shape, outcome: "Sequence[pb.GenerateResponse] | BaseException") -> tuple[str, str]:
    [found] = judge(shape, outcome)
    return found.kind, found.problem


def test_a_whole_stream_is_right() -> None:
    assert verdict(plain(3, LENGTH), messages(plain(3, LENGTH))) == ("right", "")
    shape = asked("delta", "logprobs")
    assert verdict(shape, messages(shape)) == ("right", "")


def test_a_failure_counts_for_every_sequence() -> None:
    shape = next(iter(shapes(6, [("delta", 3)], every=True)))
    assert [v.kind for v in judge(shape, Unavailable("gone"))] == ["failed"] * 3


@pytest.mark.parametrize(
    ("damage", "kind", "word"),
    [
        (lambda found: found[:4] + found[5:], "lost", "token_ids"),
        (lambda found: found[:5] + found[4:], "duplicated", "token_ids"),
        (lambda found: [found[1], found[0], *found[2:]], "differing", "token_ids"),
        (lambda found: found[:-1], "lost", "0 ends"),
        (lambda found: [*found, found[-1]], "duplicated", "2 ends"),
        (lambda found: [], "lost", "0 ends"),
    ],
    ids=["lost", "twice", "out of order", "no end", "two ends", "nothing"],
)
def test_damaged_streams_are_seen(damage: object, kind: str, word: str) -> None:
    shape = plain(3, LENGTH)
    assert callable(damage)
    found = verdict(shape, damage(messages(shape)))
    assert found[0] == kind
    assert word in found[1]


@pytest.mark.parametrize(
    ("field", "value"), [("completion_tokens", LENGTH + 1), ("prompt_tokens", 0), ("finish_reason", 1), ("text", "!")]
)
def test_wrong_facts_about_a_whole_stream_are_seen(field: str, value: object) -> None:
    shape = plain(3, LENGTH)
    found = messages(shape)
    setattr(found[-1].usage if field.endswith("tokens") else found[-1], field, value)
    kind, problem = verdict(shape, found)
    assert kind == "differing"
    assert field in problem


def test_log_probabilities_twice_are_seen() -> None:
    shape = asked("delta", "logprobs")
    found = messages(shape)
    found[1].prompt_logprobs.CopyFrom(found[0].prompt_logprobs)
    kind, problem = verdict(shape, found)
    assert kind == "differing"
    assert problem.startswith("logprobs, delta, n=1, sequence 0: prompt_logprobs")


def test_cumulative_messages_that_take_something_back_are_seen() -> None:
    shape = asked("cumulative")
    found = messages(shape)
    for before, message in itertools.pairwise(found):
        message.text = before.text + message.text
        message.token_ids[:] = [*before.token_ids, *message.token_ids]
    assert verdict(shape, found)[0] == "right"
    found[5].text = "?" + found[5].text
    assert "does not go on from" in verdict(shape, found)[1]


def test_final_outputs_in_pieces_are_seen() -> None:
    shape = asked("final")
    assert verdict(shape, messages(shape))[0] == "duplicated"
