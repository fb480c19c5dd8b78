"""Checks of streams against their expected answers."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.common.v1 import sampling_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import RequestFailed
from tests.fakes.systems.matrix.shapes import Entry, Expected, Shape, entries

Kind = Literal["right", "failed", "duplicated", "lost", "differing"]


class Verdict(msgspec.Struct, frozen=True):
    """Result of one sequence: its course, and its errors as text."""

    kind: Kind
    problem: str = ""


class _Got(msgspec.Struct):
    """Sum of the messages of one sequence."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Entry, ...] = ()
    prompt_logprobs: tuple[Entry, ...] = ()


def judge(shape: Shape, outcome: Sequence[pb.GenerateResponse] | BaseException) -> list[Verdict]:
    """Return a result for each sequence of a request. ``outcome`` has the messages, or the error."""
    if isinstance(outcome, BaseException):
        why = (
            f"{outcome.code} {outcome.reason}: {outcome.message}"
            if isinstance(outcome, RequestFailed)
            else repr(outcome)
        )
        return [Verdict("failed", f"{shape.name}: {why}")] * len(shape.expected)
    kind = shape.request.sampling_params.output_kind
    return [
        _judge(f"{shape.name}, sequence {index}", [m for m in outcome if m.index == index], kind, expected)
        for index, expected in enumerate(shape.expected)
    ]


def _judge(name: str, messages: Sequence[pb.GenerateResponse], kind: int, expected: Expected) -> Verdict:
    ends = [message for message in messages if message.finish_reason]
    if len(ends) != 1 or messages[-1] is not ends[0]:
        wrong: Kind = "duplicated" if ends else "lost"
        return Verdict(wrong, f"{name}: {len(ends)} ends in {len(messages)} messages")
    end = ends[0]
    if kind == sampling_pb2.OUTPUT_KIND_FINAL and len(messages) > 1:
        return Verdict("duplicated", f"{name}: {len(messages)} messages instead of one at the end")
    got = _cumulated(messages) if kind == sampling_pb2.OUTPUT_KIND_CUMULATIVE else _joined(messages)
    if isinstance(got, str):
        return Verdict("differing", f"{name}: {got}")
    problems = [
        f"{field} is {getattr(got, field)!r}, not {getattr(expected, field)!r}"
        for field in ("token_ids", "text", "logprobs", "prompt_logprobs")
        if getattr(got, field) != getattr(expected, field)
    ]
    reason = end.stop_reason.WhichOneof("reason")
    facts = {
        "finish_reason": end.finish_reason,
        "stop_reason": getattr(end.stop_reason, reason) if reason else None,
        "prompt_tokens": end.usage.prompt_tokens,
        "completion_tokens": end.usage.completion_tokens,
    }
    problems += [
        f"{field} is {value!r}, not {getattr(expected, field)!r}"
        for field, value in facts.items()
        if value != getattr(expected, field)
    ]
    if any(message.HasField("usage") for message in messages[:-1]):
        problems.append("usage came before the end")
    if not problems:
        return Verdict("right")
    return Verdict(_kind(got.token_ids, expected.token_ids), f"{name}: {'; '.join(problems)}")


def _kind(got: Sequence[int], expected: Sequence[int]) -> Kind:
    if len(got) > len(expected):
        return "duplicated"
    return "lost" if len(got) < len(expected) else "differing"


def _joined(messages: Sequence[pb.GenerateResponse]) -> _Got:
    got = _Got()
    for message in messages:
        got.logprobs += entries(message.logprobs, len(got.token_ids))
        got.prompt_logprobs += entries(message.prompt_logprobs, len(got.prompt_logprobs))
        got.text += message.text
        got.token_ids += tuple(message.token_ids)
    return got


def _cumulated(messages: Sequence[pb.GenerateResponse]) -> _Got | str:
    """Return the last message, or a text about a message that contradicts the previous message."""
    got = _Got()
    for message in messages:
        now = _Got(message.text, tuple(message.token_ids), entries(message.logprobs))
        now.prompt_logprobs = got.prompt_logprobs + entries(message.prompt_logprobs, len(got.prompt_logprobs))
        for field in ("text", "token_ids", "logprobs"):
            before, after = getattr(got, field), getattr(now, field)
            if after[: len(before)] != before:
                return f"{field} {after!r} does not go on from {before!r}"
        got = now
    return got
