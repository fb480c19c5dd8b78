"""One input of an ``LLM``'s call: how it is checked and computed. Runs on the event loop's thread."""

import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from penstock_common.errors import Unimplemented
from penstock_common.rpc.outputs import floats
from penstock_common.types.outputs import Logprobs
from penstock_common.types.request import Vectors
from penstock_common.types.sampling import OutputKind
from penstock_frontend.call_types import ChatRequest, GenerateRequest, PoolingPrompt, PoolingRequest, ScoreRequest
from penstock_frontend.call_types import RequestOutput as Piece
from penstock_frontend.calls.scoring import ScoringCalls
from penstock_frontend.in_process_media import UnplacedPrompt, placed
from penstock_local.llm.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    FinishReason,
    PoolingOutput,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
)
from penstock_local.llm.runtime import Runtime


class Prepared(msgspec.Struct, frozen=True):
    """A request ready to run. ``token_ids`` are its prompt, ``text`` what they were made of; ``num_sequences``: its n;
    ``number``: of the request among all that were prepared.
    """

    request: GenerateRequest
    text: str | None
    token_ids: Sequence[int]
    num_sequences: int = 1
    number: int = 0


class Calls:
    """Everything raises RequestFailed."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._scoring = ScoringCalls(runtime.llm)
        self._numbers = itertools.count()

    async def prepare(self, request: GenerateRequest) -> Prepared:
        """A request with its prompt as token ids, checked as far as it can be without computing."""
        llm, number = self._runtime.llm, next(self._numbers)
        request = msgspec.structs.replace(request, prompt=self._placed(request.prompt))
        text = request.prompt if isinstance(request.prompt, str) else None
        if text:  # an empty one is refused below, as a text
            encoded = await llm.encode(text, add_special_tokens=request.add_special_tokens)
            request = msgspec.structs.replace(request, prompt=encoded.ids or text)
        checked = await llm.inputs.process(request, "check")
        llm.inputs.check(checked, await llm.engines.wait_until_usable())
        constraint = checked.sampling_params.structured_output
        if self._runtime.tokenizer_path and constraint is not None and constraint.constrains:
            raise Unimplemented(
                "sampling_params.structured_output is set; it is not served with a tokenizer that is not the model's",
                field="sampling_params.structured_output",
            )
        return Prepared(request, text, checked.prompt_token_ids, checked.sampling_params.n, number)

    async def prepare_chat(self, request: ChatRequest) -> Prepared:
        """The same of a conversation."""
        return await self.prepare(await self._runtime.chat.renderer.render(request))

    async def generate(self, prepared: Prepared) -> RequestOutput:
        """Continue a prompt."""
        (output,) = [each async for each in pieces(self._runtime, prepared, str(prepared.number))]
        return output

    async def embed(self, request: PoolingRequest) -> EmbeddingOutput:
        """The vector of a text."""
        vectors, num_tokens = await self._pool(request)
        return EmbeddingOutput(embedding=floats(vectors), num_prompt_tokens=num_tokens)

    async def classify(self, request: PoolingRequest) -> ClassificationOutput:
        """The classes of a text."""
        vectors, num_tokens = await self._pool(request)
        probs, labels = floats(vectors), self._runtime.labels
        best = max(range(len(probs)), key=probs.__getitem__)
        label = labels[best] if best < len(labels) else ""
        return ClassificationOutput(probs=probs, label=label, num_prompt_tokens=num_tokens)

    async def encode(self, request: PoolingRequest) -> PoolingOutput:
        """Whatever the task computes of a text."""
        vectors, num_tokens = await self._pool(request)
        numbers, width = floats(vectors), vectors.shape[-1]
        rows = [numbers[start : start + width] for start in range(0, len(numbers), width)]
        return PoolingOutput(data=rows, num_prompt_tokens=num_tokens)

    async def score(self, request: ScoreRequest) -> ScoringOutput:
        """The score of a pair."""
        result = await self._scoring.run(request)
        return ScoringOutput(score=result.scores[0], num_prompt_tokens=result.prompt_tokens)

    def _placed(self, prompt: PoolingPrompt) -> PoolingPrompt:
        """The prompt, its media where they are to stand."""
        if not isinstance(prompt, UnplacedPrompt):
            return prompt
        media = self._runtime.llm.inputs.media
        return placed(prompt, media.preparer.family if media is not None else None, self._runtime.tokenizer)

    async def _pool(self, request: PoolingRequest) -> tuple[Vectors, int]:
        """The vectors of the only input, and its tokens."""
        request = msgspec.structs.replace(request, inputs=[self._placed(prompt) for prompt in request.inputs])
        result, _ = await self._runtime.llm.run_pooling(request)
        vectors = result.outputs[0].pooling_output
        if vectors is None:
            raise TypeError("an output without a vector is no answer")
        return vectors, result.prompt_tokens


def request_output(prepared: Prepared, pieces: Sequence[Piece], *, request_id: str = "") -> RequestOutput:
    """What a prompt's sequences came to, of each its last piece."""
    outputs = []
    cached = accepted = rejected = 0
    prompt_logprobs: Logprobs | None = None
    for each in sorted(pieces, key=lambda output: output.index):
        prompt_logprobs = prompt_logprobs or each.prompt_logprobs
        if each.finish is not None:
            usage = each.finish.usage
            cached = max(cached, usage.cached_tokens)
            accepted += usage.accepted_draft_tokens
            rejected += usage.rejected_draft_tokens
        outputs.append(
            CompletionOutput(
                index=each.index,
                text=each.text,
                token_ids=list(each.token_ids),
                finish_reason=FinishReason.of(each.finish.reason) if each.finish is not None else None,
                stop_reason=each.finish.stop_reason if each.finish is not None else None,
                logprobs=each.logprobs,
                cumulative_logprob=_cumulative(each.logprobs),
            )
        )
    return RequestOutput(
        request_id=request_id,
        prompt=prepared.text,
        prompt_token_ids=list(prepared.token_ids),
        outputs=outputs,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=cached,
        num_accepted_draft_tokens=accepted,
        num_rejected_draft_tokens=rejected,
        finished=all(each.finish is not None for each in pieces),
    )


def _metrics_of(live: Any, arrival: float) -> RequestMetrics:
    """How long a request took that ends now. ``arrival``: seconds since the Unix epoch."""
    first = [state.first_token_after for state in live.states if state.first_token_after is not None]
    return RequestMetrics(
        arrival_time=arrival,
        first_token_latency=min(first, default=None),
        latency=time.time() - arrival,
        num_generation_tokens=sum(state.text.num_tokens for state in live.states),
    )


def _cumulative(logprobs: Logprobs | None) -> float | None:
    """The sum over positions, the first of whose entries is the chosen token."""
    return None if logprobs is None else sum(logprobs.logprobs[first] for first in logprobs.offsets[:-1])


async def pieces(
    runtime: Runtime,
    prepared: Prepared,
    request_id: str,
    accepted: Callable[[Any], None] = lambda _: None,
) -> AsyncGenerator[RequestOutput, None]:
    """What a request's output kind says, as it comes: whole outputs so far of all its sequences, or what is new of one of them,
    or all of them once at the end. The last is ``finished``. Raises RequestFailed. However it ends, the engine goes on with
    nothing of it. ``accepted`` gets what can be aborted.
    """
    llm, kind, arrival = runtime.llm, prepared.request.sampling["output_kind"], time.time()
    live = llm.accept("")
    accepted(live)
    latest: dict[int, Piece] = {}
    unfinished = prepared.num_sequences
    try:
        async for piece in llm.generate(prepared.request, live):
            unfinished -= piece.finish is not None
            if kind is OutputKind.DELTA:
                latest.clear()
            latest[piece.index] = piece
            if kind is OutputKind.FINAL and unfinished:
                continue
            output = request_output(prepared, list(latest.values()), request_id=request_id)
            metrics = None if unfinished else _metrics_of(live, arrival)
            yield msgspec.structs.replace(output, finished=not unfinished, metrics=metrics)
    finally:
        llm.release(live)
