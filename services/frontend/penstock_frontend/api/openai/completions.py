"""Route ``/v1/completions``, which generates continuations of prompts. The answer is complete or streamed."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from penstock_common.config.settings import Reread
from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.outputs import Logprobs
from penstock_frontend.api.http.endpoint import Answer, Call
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.http.streaming import EventStream
from penstock_frontend.api.openai import sampling_fields
from penstock_frontend.api.openai.body_fields import check_range
from penstock_frontend.api.openai.choice_logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    TextOffsets,
    add_completion_logprobs,
    prompt_logprobs,
    ranked,
)
from penstock_frontend.api.openai.context import context_of
from penstock_frontend.api.openai.generation import (
    AS_MANY_AS_FIT,
    FINISH_REASONS,
    Generation,
    Given,
    Prompt,
    PromptOutput,
    Source,
    prepare,
    split,
)
from penstock_frontend.api.openai.sampling_fields import SamplingFields, StreamOptions, TokenId, predicted_text
from penstock_frontend.api.openai.usage import UsageCount, UsageInfo, usage_info
from penstock_frontend.call_types import GenerateRequest, RequestOutput, Usage
from penstock_frontend.calls.admission import Demand, demand_of
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.config import LimitsConfig
from penstock_frontend.loop_yield import Pace
from penstock_frontend.processing.outputs.detokenizer import IncrementalDetokenizer
from penstock_frontend.processing.prompts.infill import infill_prompt


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one sequence, or a piece of this output in a stream.

    OpenAI's API does not have ``stop_reason`` (the stop string or token id that ended the output) and the fields after
    ``stop_reason``. These fields are from vLLM's API.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChoiceStyle(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the content of a call's choices. If ``only_prompt`` is set, engines generate one token, and the
    choices do not show it.
    """

    echo: bool
    only_prompt: bool
    token_ids: bool
    prompt_logprobs: bool

    def counted(self, usage: Usage) -> Usage:
        """Return the token counts of a finished sequence. If the choices do not show the output, its tokens are not
        counted.
        """
        if not self.only_prompt:
            return usage
        return msgspec.structs.replace(usage, completion_tokens=0, accepted_draft_tokens=0, rejected_draft_tokens=0)


class ChoiceWriter:
    """Writes the choice of one sequence. ``offsets`` is set if the request asks for log-probabilities."""

    def __init__(self, index: int, prompt: Prompt, style: ChoiceStyle, offsets: TextOffsets | None) -> None:
        self._index = index
        self._prompt = prompt
        self._style = style
        self._offsets = offsets
        self._started = False
        self._num_tokens = 0

    def write(self, output: RequestOutput, of_prompt: Logprobs | None) -> CompletionChoice:
        """Return the choice for a piece of output. The first piece begins with the prompt if the prompt is echoed."""
        style, first = self._style, not self._started
        self._started = True
        self._num_tokens += 0 if style.only_prompt else len(output.token_ids)
        finish = output.finish
        reason = FINISH_REASONS[finish.reason] if finish else None
        return CompletionChoice(
            index=self._index,
            text=(self._prompt.echo if first else "") + ("" if style.only_prompt else output.text),
            logprobs=self._logprobs(output, of_prompt, first=first),
            finish_reason="length" if finish and style.only_prompt else reason,
            stop_reason=finish.stop_reason if finish and not style.only_prompt else None,
            prompt_logprobs=prompt_logprobs(of_prompt) if style.prompt_logprobs and first else msgspec.UNSET,
            token_ids=([] if style.only_prompt else list(output.token_ids)) if style.token_ids else msgspec.UNSET,
            prompt_token_ids=self._prompt.token_ids or [] if style.token_ids and first else msgspec.UNSET,
        )

    def usage_so_far(self) -> UsageInfo:
        """Return the number of prompt tokens, and the number of output tokens that were written so far."""
        return usage_info(len(self._prompt.token_ids or ()), self._num_tokens)

    def _logprobs(self, output: RequestOutput, of_prompt: Logprobs | None, *, first: bool) -> CompletionLogprobs | None:
        if self._offsets is None:
            return None
        written = CompletionLogprobs([], [], [], [])
        if self._style.echo and first and self._prompt.token_ids:
            self._echo(written, of_prompt)
        if output.logprobs is not None and not self._style.only_prompt:
            add_completion_logprobs(written, output.logprobs, self._offsets)
        return written

    def _echo(self, written: CompletionLogprobs, of_prompt: Logprobs | None) -> None:
        if self._offsets is None or not self._prompt.token_ids:
            return
        token_id = self._prompt.token_ids[0]
        [offset] = self._offsets.of([token_id])
        written.add(self._offsets.name_of(token_id), offset, None, None)
        if of_prompt is not None:
            add_completion_logprobs(written, of_prompt, self._offsets)


DEFAULT_MAX_TOKENS = 16
_INT32_MAX = 2**31 - 1
_POSITIONS_PER_TURN = 256
"""Number of choices and positions of log-probabilities that are written in one iteration of the event loop."""


class CompletionRequest(SamplingFields, kw_only=True):
    """Request body of ``/v1/completions``. ``prompt`` is a text, token ids, or a list of texts or of lists of token
    ids.
    """

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate for each prompt. The answer shows ``n`` of them."""
        return self.best_of or self.n or 1


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A complete answer, or a chunk of a streamed answer. The choice with the index p * n + i is sequence i of prompt
    p.
    """

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    usage: UsageInfo | msgspec.UnsetType | None = msgspec.UNSET
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class Completions:
    """Handler of ``/v1/completions``."""

    def __init__(self, llm: AsyncLLM, *, limits: Reread[LimitsConfig]) -> None:
        self._llm = llm
        self._limits = limits

    async def __call__(self, call: Call, raw: Body) -> Answer:
        """Generate continuations of the prompts. Raises RequestFailed if the request is refused or fails."""
        body = await raw.decode(CompletionRequest)
        model = self._llm.inputs.check_model(body.model or "", body.lora or "")
        _check(body)
        if body.truncate_prompt_tokens == AS_MANY_AS_FIT:
            room = await self._llm.prompt_room(body.max_tokens or DEFAULT_MAX_TOKENS, call.context)
            body.truncate_prompt_tokens = room
        given = split(body.prompt, self._limits.now.max_prompts)
        self._check_sequences(len(given), body)
        call = self._with_kv(call, len(given), body)
        if body.suffix is not None:
            given = [_infilled(self._llm, each, body.suffix) for each in given]
        making = _Making(self._llm, body, call, model)
        generation = Generation(self._llm, await making.sources(given), raw)
        if body.stream:
            return await EventStream.started(making.chunks(generation))
        return await making.whole(generation)

    def _with_kv(self, call: Call, prompts: int, body: CompletionRequest) -> Call:
        of = "best_of" if body.best_of else "n"
        call = sampling_fields.with_kv(call, body, self._llm.gateway, num_sequences=body.num_sequences, of=of)
        if call.context.kv.lease and prompts > 1:
            raise InvalidArgument(
                f"kv_transfer_params.do_remote_decode is true, but prompt has {prompts} prompts; send only one prompt "
                "per call",
                field="prompt",
            )
        return call

    def _check_sequences(self, prompts: int, body: CompletionRequest) -> None:
        limit, n = self._limits.now.max_sequences_per_call, body.num_sequences
        if prompts > 1 and prompts * n > limit:
            name = "n" if body.best_of is None else "best_of"
            raise InvalidArgument(
                f"{name} is {n}: with {prompts} prompts the call has {prompts * n} sequences; "
                f"limits.max_sequences_per_call is {limit}",
                field=name,
            )


class _Making:
    """Produces the answer of one call, complete or in chunks."""

    def __init__(self, llm: AsyncLLM, body: CompletionRequest, call: Call, model: str) -> None:
        self._llm = llm
        self._body = body
        self._context = context_of(call, "cmpl", body)
        self._id = self._context.external_request_id
        self._model = model
        self._created = int(time.time())
        self._options = body.stream_options or StreamOptions()
        self._usage = UsageCount()
        self._writers: dict[int, ChoiceWriter] = {}
        self._style = ChoiceStyle(
            echo=bool(body.echo),
            only_prompt=body.max_tokens == 0,
            token_ids=bool(body.return_token_ids),
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        self._prompts: Sequence[Prompt] = ()
        self._prediction = predicted_text(body.prediction)

    async def sources(self, given: Sequence[Given]) -> list[Source[RequestOutput]]:
        """Return one request for each prompt. Raises RequestFailed if the body is not valid.

        If a limit does not allow all of the requests, the error is raised before any prompt is tokenized.
        """
        tenant = self._context.tenant
        self._llm.check_room(
            [Demand(tenant, len(each) + len(self._prediction or ""), self._body.num_sequences) for each in given]
        )
        body, values = self._body, _values(self._body)
        logprobs = body.logprobs is not None
        needs_ids = logprobs or bool(body.return_token_ids or self._options.continuous_usage_stats)
        skip = body.skip_special_tokens is not False
        add = body.add_special_tokens is not False
        names = _names(body)
        self._prompts = await asyncio.gather(
            *(
                prepare(
                    self._llm,
                    each,
                    field="prompt" if len(given) == 1 else f"prompt[{index}]",
                    needs_ids=needs_ids,
                    echo=bool(body.echo),
                    keep=body.truncate_prompt_tokens,
                    add_special_tokens=add,
                    skip_special_tokens=skip,
                    names=names,
                )
                for index, each in enumerate(given)
            )
        )
        return [
            self._source(prompt, self._id if len(given) == 1 else f"{self._id}-{index}", values)
            for index, prompt in enumerate(self._prompts)
        ]

    async def whole(self, generation: Generation[RequestOutput]) -> Completion:
        """Return the complete answer, after all sequences have ended."""
        finals: list[list[RequestOutput]] = [[] for _ in self._prompts]
        of_prompts: dict[int, Logprobs | None] = {}
        with generation:
            async with aclosing(generation.outputs()) as outputs:
                async for each in outputs:
                    finals[each.prompt].append(each.output)
                    self._count(each)
                    if each.output.index == 0:
                        of_prompts[each.prompt] = each.output.prompt_logprobs
        choices, pace, width = [], Pace(_POSITIONS_PER_TURN), self._body.n or 1
        for prompt, of_prompt in enumerate(finals):
            for index, output in enumerate(self._chosen(of_prompt)[:width]):
                await pace.take(1 + (len(output.token_ids) if self._body.logprobs is not None else 0))
                shown = PromptOutput(prompt, msgspec.structs.replace(output, index=index))
                choices.append(self._writer(shown).write(shown.output, of_prompts[prompt]))
        kv = sampling_fields.kv_answer(output.finish for of_prompt in finals for output in of_prompt)
        return self._completion(choices, self._usage.total(), **kv)

    async def chunks(self, generation: Generation[RequestOutput]) -> AsyncGenerator[Completion, None]:
        """Yield the chunks of a streamed answer."""
        every = bool(self._options.continuous_usage_stats)
        none = None if self._options.include_usage else msgspec.UNSET
        with generation:
            async with aclosing(generation.outputs()) as outputs:
                async for each in outputs:
                    self._count(each)
                    choice = self._writer(each).write(each.output, each.output.prompt_logprobs)
                    usage = self._writer(each).usage_so_far() if every else none
                    yield self._completion([choice], usage, **sampling_fields.kv_answer([each.output.finish]))
        if self._options.include_usage:
            yield self._completion([], self._usage.total())

    def _source(self, prompt: Prompt, request_id: str, values: dict[str, Any]) -> Source[RequestOutput]:
        request = GenerateRequest(
            prompt=prompt.given,
            sampling=values,
            add_special_tokens=self._body.add_special_tokens is not False,
            prediction=self._prediction,
            context=msgspec.structs.replace(self._context, external_request_id=request_id),
        )
        return Source(request_id, demand_of(request), functools.partial(self._llm.generate, request), prompt.names)

    def _index(self, each: PromptOutput[RequestOutput]) -> int:
        return each.prompt * (self._body.n or 1) + each.output.index

    def _chosen(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Return the sequences of a prompt that become choices, in the order of the choices."""
        if self._body.num_sequences > (self._body.n or 1):
            return ranked(sorted(outputs, key=lambda output: output.index))
        return sorted(outputs, key=lambda output: output.index)

    def _count(self, each: PromptOutput[RequestOutput]) -> None:
        if each.output.finish is not None:
            self._usage.finished(each.prompt, each.output.index, self._style.counted(each.output.finish.usage))

    def _writer(self, each: PromptOutput[RequestOutput]) -> ChoiceWriter:
        index, prompt = self._index(each), self._prompts[each.prompt]
        if index not in self._writers:
            offsets = self._offsets(prompt) if self._body.logprobs is not None else None
            self._writers[index] = ChoiceWriter(index, prompt, self._style, offsets)
        return self._writers[index]

    def _offsets(self, prompt: Prompt) -> TextOffsets:
        """Return the object that computes the text offsets of an output. If the prompt is not echoed, it is only
        context for decoding.
        """
        context = () if self._body.echo else prompt.token_ids or ()
        skip = self._body.skip_special_tokens is not False
        tokenizer = self._llm.tokenizer
        return TextOffsets(
            IncrementalDetokenizer(tokenizer, context, skip_special_tokens=skip), tokenizer.text_of, tokenizer.bytes_of
        )

    def _completion(
        self,
        choices: Sequence[CompletionChoice],
        usage: UsageInfo | msgspec.UnsetType | None,
        **kv: Any,
    ) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage, **kv)


def _check(body: CompletionRequest) -> None:
    sampling_fields.check(body)
    check_range("logprobs", body.logprobs, -1, _INT32_MAX)
    _check_best_of(body)
    if body.suffix is not None and body.echo:
        raise InvalidArgument("echo is not supported with suffix; leave one of them out", field="echo")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidArgument("max_tokens is 0; it must be at least 1 unless echo is set", field="max_tokens")
    if body.echo and body.stream and body.logprobs is not None and (body.n or 1) > 1:
        raise Unimplemented(
            "echo with logprobs and n above 1 is not supported in a stream; set stream to false", field="stream"
        )


def _check_best_of(body: CompletionRequest) -> None:
    n = body.n or 1
    if body.best_of is not None and body.best_of < n:
        raise InvalidArgument(f"best_of is {body.best_of}; it must be at least n, which is {n}", field="best_of")
    check_range("best_of", body.best_of, 1, _INT32_MAX)
    if body.stream and body.num_sequences > n:
        raise InvalidArgument(
            f"best_of is {body.best_of} and n is {n}, but a stream cannot select the best outputs; set both to the same "
            "value, or set stream to false",
            field="best_of",
        )


def _infilled(llm: AsyncLLM, prompt: Given, suffix: str) -> str:
    """Return the fill-in-the-middle prompt for the body's prompt and suffix. Raises InvalidArgument and Unimplemented."""
    if not isinstance(prompt, str):
        raise InvalidArgument(
            "suffix is set, but prompt is token ids; with suffix, prompt must be text", field="prompt"
        )
    return infill_prompt(llm.tokenizer, prompt, suffix)


def _names(body: CompletionRequest) -> Mapping[str, str]:
    names = sampling_fields.names(body)
    return names if body.best_of is None else {"sampling_params.n": "best_of", **names}


def _values(body: CompletionRequest) -> dict[str, Any]:
    """Return the sampling parameters of the body. If the prompt is echoed, it gets as many log-probabilities as the
    output.
    """
    values = {"n": 1, "max_tokens": DEFAULT_MAX_TOKENS, **sampling_fields.values(body)}
    values["max_tokens"] = max(values["max_tokens"], 1)
    values["n"] = body.num_sequences
    values |= sampling_fields.num_logprobs(body, body.logprobs, field="logprobs to 0")
    if body.logprobs is not None:
        if body.echo:
            asked = body.prompt_logprobs
            values["prompt_logprobs"] = body.logprobs if asked is None else _wider(asked, body.logprobs)
    elif body.num_sequences > (body.n or 1):
        values["logprobs"] = 0
    return values


def _wider(first: int, second: int) -> int:
    return -1 if -1 in (first, second) else max(first, second)
