"""Answers whose log-probabilities are compared to the last bit."""

import itertools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from tests.fakes.engines.in_process import CLIENT, build_engine

NUM_LIKELIEST = 20
"""Number of log-probabilities at each position, in addition to that of the position's own token."""
Position = tuple[tuple[int, ...], bytes, tuple[int, ...]]
"""Entries of a position: token ids, their log-probabilities as float32 bytes, and their ranks."""


class _Columns(Protocol):
    """Interface of ``penstock.common.v1.Logprobs`` and of the engine's struct with that name."""

    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def ranks(self) -> Sequence[int]: ...


class Scored(msgspec.Struct):
    """An answer's tokens, and the log-probabilities of each token and of each prompt position except the first."""

    token_ids: list[int] = []
    prompt: list[Position] = []
    output: list[Position] = []

    def take(self, piece: pb.GenerateResponse) -> None:
        """Add a message of a stream."""
        self.token_ids += piece.token_ids
        self.prompt += _positions(piece.prompt_logprobs)
        self.output += _positions(piece.logprobs)

    def difference(self, other: "Scored") -> str:
        """Return a text about the first difference from another answer, or an empty text."""
        for name in self.__struct_fields__:
            own, others = getattr(self, name), getattr(other, name)
            for i, (one, another) in enumerate(itertools.zip_longest(own, others)):
                if one != another:
                    return f"{name} {i} of {len(own)}, {len(others)}: {_shown(one)}, not {_shown(another)}"
        return ""


def alone(path: Path, prompts: Sequence[Sequence[int]], count: int) -> list[Scored]:
    """Return the ``count`` greedy tokens after each prompt, from an engine in this process with one request at a time.

    The engine has all experts. Its log-probabilities are float32, because they come directly from the scheduler.
    """
    engine = build_engine(path, cache={"block_size": 16, "num_blocks": 128, "enable_prefix_caching": False})
    params = SamplingParams(
        temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=NUM_LIKELIEST, prompt_logprobs=NUM_LIKELIEST
    )
    answers = []
    for number, prompt in enumerate(prompts):
        answer = Scored()
        request = EngineCoreRequest(request_id=str(number), prompt_token_ids=list(prompt), sampling_params=params)
        engine.add(engine.preprocess(CLIENT, request))
        while engine.has_requests:
            for outputs in engine.step(lambda: None).values():
                for output in outputs.outputs:
                    assert output.error is None, output.error
                    answer.token_ids += output.new_token_ids
                    answer.prompt += _positions(output.new_prompt_logprobs)
                    answer.output += _positions(output.new_logprobs)
        answers.append(answer)
    return answers


def _positions(columns: _Columns | None) -> list[Position]:
    if columns is None:
        return []
    values = array("f", columns.logprobs)
    assert values.tolist() == list(columns.logprobs), "log-probabilities are no float32"
    return [
        (tuple(columns.token_ids[start:end]), values[start:end].tobytes(), tuple(columns.ranks[start:end]))
        for start, end in itertools.pairwise(columns.offsets)
    ]


def _shown(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    token_ids, logprobs, ranks = value
    return f"{token_ids}, {[each.hex() for each in array('f', logprobs)]}, {ranks}"
