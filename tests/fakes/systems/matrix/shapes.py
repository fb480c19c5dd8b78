"""Requests of every kind, with the expected answers, computed only from the oracle and the tokenizer."""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from penstock.common.v1 import finish_pb2, logprobs_pb2, sampling_pb2, structured_output_pb2
from penstock.inference.v1 import messages_pb2 as pb
from tests.fakes.engines.fake_engine import logprobs_of
from tests.fakes.engines.oracle_engine import outputs
from tests.fakes.models.small_tokenizers import byte_level

LENGTH = 12
"""Number of output tokens of every request that no stop condition ends earlier."""
PROMPT = "hello world"
KINDS = {
    "delta": sampling_pb2.OUTPUT_KIND_DELTA,
    "cumulative": sampling_pb2.OUTPUT_KIND_CUMULATIVE,
    "final": sampling_pb2.OUTPUT_KIND_FINAL,
}
_NEVER = "\x00"


class Expected(msgspec.Struct, frozen=True):
    """Expected result of one sequence. ``prompt_logprobs`` has entries like ``logprobs``."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: int
    stop_reason: str | int | None
    prompt_tokens: int
    completion_tokens: int
    logprobs: "tuple[Entry, ...]"
    prompt_logprobs: "tuple[Entry, ...]"


class Entry(msgspec.Struct, frozen=True, order=True):
    """One entry of log-probabilities. ``position`` counts from the sequence's first token."""

    position: int
    token_id: int
    logprob: float
    rank: int


class Shape(msgspec.Struct, frozen=True):
    """One request of a cell. ``name`` contains its kind and its number of sequences."""

    name: str
    request: pb.GenerateRequest
    expected: tuple[Expected, ...]


def shapes(offset: int, variants: Iterable[tuple[str, int]], *, every: bool, seed: int = 0) -> Iterator[Shape]:
    """Return requests of every kind, for a failure that happens when ``offset`` tokens of each request were sent.

    Stop strings begin before that token and end after it. ``variants``: pairs of output kind and n. If ``every`` is
    set, each shape has all variants; otherwise the shapes use the variants in turn.
    """
    variants = list(variants)
    if every:
        combined = itertools.product(_PARAMETERS.items(), variants)
    else:
        combined = zip(_PARAMETERS.items(), itertools.cycle(variants), strict=False)
    numbers = itertools.count(seed * 1000, 10)
    for (name, make), (kind, count) in combined:
        params = make(next(numbers), offset, count)
        params.n, params.max_tokens, params.output_kind = count, LENGTH, KINDS[kind]
        request = pb.GenerateRequest(text=PROMPT, sampling_params=params)
        yield Shape(f"{name}, {kind}, n={count}", request, tuple(_expected(params, index) for index in range(count)))


def plain(seed: int, length: int) -> Shape:
    """Return a request for a stream of tokens."""
    params = sampling_pb2.SamplingParams(seed=seed, max_tokens=length)
    return Shape("plain", pb.GenerateRequest(text=PROMPT, sampling_params=params), (_expected(params, 0),))


def entries(message: logprobs_pb2.Logprobs, first: int = 0) -> tuple[Entry, ...]:
    """Return the entries of log-probabilities. ``first``: index of the first position."""
    found = []
    for position, (start, end) in enumerate(itertools.pairwise(message.offsets), start=first):
        for at in range(start, end):
            found.append(Entry(position, message.token_ids[at], message.logprobs[at], message.ranks[at]))
    return tuple(found)


Make = Callable[[int, int, int], sampling_pb2.SamplingParams]


def _plain(seed: int, offset: int, count: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(seed=seed)


def _walked(seed: int, offset: int, count: int) -> sampling_pb2.SamplingParams:
    """Return parameters for characters that span several tokens."""
    return sampling_pb2.SamplingParams(seed=outputs.WALK + seed)


def _stop(seed: int, offset: int, count: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(seed=seed, stop=[_across(seed + i, offset) for i in range(count)])


def _stop_included(seed: int, offset: int, count: int) -> sampling_pb2.SamplingParams:
    params = _stop(seed, offset, count)
    params.include_stop_str_in_output = True
    return params


def _stop_after_min_tokens(seed: int, offset: int, count: int) -> sampling_pb2.SamplingParams:
    """Return parameters with a stop before min_tokens, which has no effect, and a stop after it."""
    params = _stop(seed, offset, count)
    params.min_tokens = 3
    params.stop.extend(_text(outputs.token(seed + i, 0)) for i in range(count))
    return params


def _stop_missed(seed: int, offset: int, count: int) -> sampling_pb2.SamplingParams:
    """Return parameters with a stop string whose beginning occurs, so that text is held back, but not its end."""
    return sampling_pb2.SamplingParams(seed=seed, stop=[_across(seed + i, offset) + _NEVER for i in range(count)])


def _stop_token(seed: int, offset: int, count: int) -> sampling_pb2.SamplingParams:
    """Return parameters with the token after the failure, of each sequence, as stop token."""
    at = min(offset, LENGTH - 1)
    tokens = sorted({outputs.token(seed + i, at) for i in range(count)})
    return sampling_pb2.SamplingParams(seed=seed, stop_token_ids=tokens, min_tokens=at)


def _choice(seed: int, offset: int, count: int) -> sampling_pb2.SamplingParams:
    constraint = structured_output_pb2.StructuredOutput(choice={"options": _options()})
    return sampling_pb2.SamplingParams(seed=seed, structured_output=constraint)


def _json(seed: int, offset: int, count: int) -> sampling_pb2.SamplingParams:
    schema = json.dumps({"enum": [json.loads(text) for text in _json_options()]})
    constraint = structured_output_pb2.StructuredOutput(json_schema=schema)
    return sampling_pb2.SamplingParams(seed=seed, structured_output=constraint)


def _logprobs(seed: int, offset: int, count: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(seed=seed, logprobs=2, prompt_logprobs=1)


def _stop_logprobs(seed: int, offset: int, count: int) -> sampling_pb2.SamplingParams:
    params = _stop(seed, offset, count)
    params.logprobs = 1
    return params


_PARAMETERS: dict[str, Make] = {
    "plain": _plain,
    "characters of several tokens": _walked,
    "stop": _stop,
    "stop, included": _stop_included,
    "stop after min_tokens": _stop_after_min_tokens,
    "stop, missed": _stop_missed,
    "stop token": _stop_token,
    "choice": _choice,
    "json": _json,
    "logprobs": _logprobs,
    "stop with logprobs": _stop_logprobs,
}


def _text(*token_ids: int) -> str:
    text: str = byte_level().decode(list(token_ids), skip_special_tokens=True)
    return text


def _across(seed: int, offset: int) -> str:
    """Return the end of the token before the offset, the whole next token, and the beginning of the token after it."""
    at = min(max(offset, 1), LENGTH - 1)
    before, behind = _text(outputs.token(seed, at - 1)), _text(outputs.token(seed, at))
    following = _text(outputs.token(seed, at + 1)) if at + 1 < LENGTH else ""
    return before[-1] + behind + following[:1]


@functools.cache
def _options() -> list[str]:
    """Return texts of LENGTH - 1 tokens. With the end-of-sequence token, they have LENGTH tokens."""
    return list(itertools.islice((text for text in _texts() if _num_tokens(text) == LENGTH - 1), 5))


@functools.cache
def _json_options() -> list[str]:
    objects = (json.dumps({"a": text[:size]}) for text in _texts() for size in range(1, len(text)))
    return list(itertools.islice((text for text in objects if _num_tokens(text) == LENGTH - 1), 5))


def _texts() -> Iterator[str]:
    for seed in itertools.count(1):
        yield _text(*(outputs.token(seed, index) for index in range(LENGTH - 1)))


def _num_tokens(text: str) -> int:
    return len(byte_level().encode(text, add_special_tokens=False).ids)


def _expected(params: sampling_pb2.SamplingParams, index: int) -> Expected:
    """Return the expected result of sequence ``index``."""
    own = sampling_pb2.SamplingParams()
    own.CopyFrom(params)
    own.seed += index
    tokens = outputs.output(own, params.max_tokens)
    finish, reason, shown = finish_pb2.FINISH_REASON_LENGTH, None, len(tokens)
    for at, token in enumerate(tokens):
        if at + 1 < params.min_tokens:
            continue
        if token in params.stop_token_ids or token == outputs.eos_token_id():
            finish = finish_pb2.FINISH_REASON_STOP
            reason = token if token in params.stop_token_ids else None
            tokens, shown = tokens[: at + 1], at
            break
    text, completion = _text(*tokens[:shown]), len(tokens)
    if params.stop and (cut := _cut(params, tokens[:shown])) is not None:
        text, kept, completion, reason = cut
        finish, tokens = finish_pb2.FINISH_REASON_STOP, tokens[:kept]
    prompt = byte_level().encode(PROMPT).ids
    logprobs = entries(logprobs_of(tokens, params.logprobs)) if params.HasField("logprobs") else ()
    asks = params.HasField("prompt_logprobs") and index == 0
    of_prompt = entries(logprobs_of(prompt[1:], params.prompt_logprobs)) if asks else ()
    return Expected(text, tuple(tokens), finish, reason, len(prompt), completion, logprobs, of_prompt)


def _cut(params: sampling_pb2.SamplingParams, tokens: Sequence[int]) -> tuple[str, int, int, str] | None:
    """Return the text, the remaining tokens, the used tokens, and the first complete stop string. None if there is
    none.
    """
    texts = [_text(token) for token in tokens]
    ends = list(itertools.accumulate(len(text) for text in texts))
    text = "".join(texts)
    begin = ends[params.min_tokens - 1] if params.min_tokens else 0
    found = [(at + len(stop), -len(stop), stop) for stop in params.stop if (at := text.find(stop, begin)) >= 0]
    if not found:
        return None
    end, _, stop = min(found)
    used = next(count for count, token_end in enumerate(ends, start=1) if token_end >= end)
    if params.include_stop_str_in_output:
        return text[:end], used, used, stop
    start = end - len(stop)
    return text[:start], sum(token_end <= start for token_end in ends), used, stop
