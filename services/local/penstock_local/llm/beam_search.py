"""Beam search on top of an engine without support for beam search.

Each step generates one token per beam, with cached prefixes. The algorithm is the usual one: all beams are extended by
one token, and the most likely ``beam_width`` sequences are kept. Sequences that end with an end-of-sequence token are
complete, and leave the beams.
"""

import asyncio
import heapq
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.sampling import OutputKind
from penstock_frontend.call_types import GenerateRequest, MixedPrompt
from penstock_local.llm.calls import Calls, Prepared
from penstock_local.llm.outputs import Beam, BeamSearchOutput, FinishReason
from penstock_local.llm.parameters import BEAM_SEARCH, NamesReplacements
from penstock_local.llm.runtime import Runtime


class BeamSearchParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=NamesReplacements
):
    """Parameters of a beam search with ``beam_width`` sequences of up to ``max_tokens`` tokens. Raises InvalidArgument
    if a parameter is not valid.

    A score is the sum of log-probabilities divided by the length to the power of ``length_penalty``. Values above 0
    favor long sequences.
    """

    replacements = BEAM_SEARCH

    beam_width: Annotated[int, Meta(ge=1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be at least 1", field=name)


def beam_search_params(given: object) -> BeamSearchParams:
    """Convert a mapping to search parameters, or return parameters unchanged. Raises InvalidArgument if the mapping is
    not valid.
    """
    if isinstance(given, BeamSearchParams):
        return given
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise InvalidArgument(
            f"params is of type {kind}; it must be BeamSearchParams or a mapping of its fields", field="params"
        )
    for name in given:
        if refusal := BeamSearchParams.refusal(str(name)):
            raise InvalidArgument(f"params: {refusal}", field="params")
    try:
        return msgspec.convert(dict(given), BeamSearchParams)
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"params: {e}", field="params") from None


class _Sequence(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    logprob: float


class BeamSearch:
    """Beam search of one call, which runs on the event loop's thread."""

    def __init__(self, calls: Calls, runtime: Runtime, params: BeamSearchParams) -> None:
        self._calls = calls
        self._runtime = runtime
        self._params = params
        self._eos = frozenset() if params.ignore_eos else runtime.eos_token_ids
        self._sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": 1,
            "logprobs": 2
            * params.beam_width,  # enough candidates even if every beam ends, because the same number of candidates continue
            "ignore_eos": True,
            "detokenize": False,
            "repetition_penalty": 1.0,
            "output_kind": OutputKind.FINAL,
        }

    async def run(self, prompt: Prepared) -> BeamSearchOutput:
        """Search for continuations of a prompt. Raises RequestFailed if the prompt has media or a request fails."""
        if isinstance(prompt.request.prompt, MixedPrompt):
            raise Unimplemented(
                "beam search does not support prompts with media; use generate", field="multi_modal_data"
            )
        width = self._params.beam_width
        room = self._runtime.engine.view.limits.max_model_len - len(prompt.token_ids)
        beams, ended = [_Sequence((), 0.0)], list[_Sequence]()
        for _ in range(min(self._params.max_tokens, room)):
            candidates = [each for found in await self._continued(prompt, beams) for each in found]
            ended += [each for each in candidates if each.token_ids[-1] in self._eos]
            going_on = (each for each in candidates if each.token_ids[-1] not in self._eos)
            beams = heapq.nlargest(width, going_on, key=lambda each: each.logprob)
            if not beams:
                break
        best = heapq.nlargest(width, [*ended, *beams], key=self._score)
        return BeamSearchOutput(
            prompt=prompt.text,
            prompt_token_ids=list(prompt.token_ids),
            beams=[self._beam(prompt.token_ids, each) for each in best],
        )

    async def _continued(self, prompt: Prepared, beams: Sequence[_Sequence]) -> list[list[_Sequence]]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._continue(prompt, beam)) for beam in beams]
        return [task.result() for task in tasks]

    async def _continue(self, prompt: Prepared, beam: _Sequence) -> list[_Sequence]:
        """Return the beam extended by each of its most likely next tokens."""
        token_ids = [*prompt.token_ids, *beam.token_ids]
        request = GenerateRequest(prompt=token_ids, sampling=self._sampling, context=prompt.request.context)
        output = await self._calls.generate(Prepared(request, None, token_ids))
        logprobs = output.outputs[0].logprobs
        if logprobs is None:
            raise TypeError("the output has no log-probabilities")
        # The first entry is the chosen token, which is also one of the most likely tokens.
        likeliest = dict(zip(logprobs.token_ids, logprobs.logprobs, strict=True))
        return [_Sequence((*beam.token_ids, token), beam.logprob + logprob) for token, logprob in likeliest.items()]

    def _score(self, sequence: _Sequence) -> float:
        norm: float = len(sequence.token_ids) ** self._params.length_penalty
        return sequence.logprob / norm

    def _beam(self, prompt: Sequence[int], sequence: _Sequence) -> Beam:
        tokenizer = self._runtime.tokenizer
        shown = [token for token in sequence.token_ids if token not in tokenizer.special_ids]
        before = tokenizer.decode(prompt)
        whole = tokenizer.decode([*prompt, *shown])
        text = whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(shown)
        ended = sequence.token_ids[-1] in self._eos
        return Beam(
            text=text,
            token_ids=list(sequence.token_ids),
            cumulative_logprob=sequence.logprob,
            score=self._score(sequence),
            finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
        )
