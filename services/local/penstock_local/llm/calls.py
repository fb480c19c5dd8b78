"""Processing of a single input of an ``LLM`` call, on the event loop's thread: checks and computation."""

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
    """A request that is ready to run.

    Attributes:
        request: The request, with its prompt as token ids.
        text: Text of the prompt; None if token ids were given.
        token_ids: Token ids of the prompt.
        num_sequences: Number of outputs (n).
        number: Sequence number among all prepared requests.
    """

    request: GenerateRequest
    text: str | None
    token_ids: Sequence[int]
    num_sequences: int = 1
    number: int = 0


class Calls:
    """Operations of an ``LLM`` on one input. All methods raise RequestFailed."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._scoring = runtime.assembly.scoring
        self._numbers = itertools.count()

    async def prepare(self, request: GenerateRequest) -> Prepared:
        """Tokenize the prompt of a request, and do all checks of the request that need no computation on the engine."""
        llm, number = self._runtime.llm, next(self._numbers)
        request = msgspec.structs.replace(request, prompt=self._placed(request.prompt))
        text = request.prompt if isinstance(request.prompt, str) else None
        if text:  # do not tokenize an empty text, so that the check below refuses it as a text
            encoded = await llm.encode(text, add_special_tokens=request.add_special_tokens)
            request = msgspec.structs.replace(request, prompt=encoded.ids or text)
        checked = await llm.inputs.process(request, "check")
        llm.inputs.check(checked, await llm.engines.wait_until_usable())
        constraint = checked.sampling_params.structured_output
        if self._runtime.tokenizer_path and constraint is not None and constraint.constrains:
            raise Unimplemented(
                "sampling_params.structured_output is set, but it is not supported with a custom tokenizer; "
                "remove one of them",
                field="sampling_params.structured_output",
            )
        return Prepared(request, text, checked.prompt_token_ids, checked.sampling_params.n, number)

    async def prepare_chat(self, request: ChatRequest) -> Prepared:
        """Render a conversation and prepare it like a prompt."""
        return await self.prepare(await self._runtime.chat.renderer.render(request))

    async def generate(self, prepared: Prepared) -> RequestOutput:
        """Generate the outputs of a prompt."""
        (output,) = [each async for each in pieces(self._runtime, prepared, str(prepared.number))]
        return output

    async def embed(self, request: PoolingRequest) -> EmbeddingOutput:
        """Compute the embedding of a text."""
        vectors, num_tokens = await self._pool(request)
        return EmbeddingOutput(embedding=floats(vectors), num_prompt_tokens=num_tokens)

    async def classify(self, request: PoolingRequest) -> ClassificationOutput:
        """Compute the class probabilities of a text."""
        vectors, num_tokens = await self._pool(request)
        probs, labels = floats(vectors), self._runtime.labels
        best = max(range(len(probs)), key=probs.__getitem__)
        label = labels[best] if best < len(labels) else ""
        return ClassificationOutput(probs=probs, label=label, num_prompt_tokens=num_tokens)

    async def encode(self, request: PoolingRequest) -> PoolingOutput:
        """Compute the result of a pooling task for a text."""
        vectors, num_tokens = await self._pool(request)
        numbers, width = floats(vectors), vectors.shape[-1]
        rows = [numbers[start : start + width] for start in range(0, len(numbers), width)]
        return PoolingOutput(data=rows, num_prompt_tokens=num_tokens)

    async def score(self, request: ScoreRequest) -> ScoringOutput:
        """Compute the score of a pair of texts."""
        result = await self._scoring.run(request)
        return ScoringOutput(score=result.scores[0], num_prompt_tokens=result.prompt_tokens)

    def _placed(self, prompt: PoolingPrompt) -> PoolingPrompt:
        """Return the prompt with its media at their placeholders."""
        if not isinstance(prompt, UnplacedPrompt):
            return prompt
        inputs = self._runtime.llm.inputs
        family = inputs.media.preparer.family if inputs.media is not None else None
        return placed(prompt, family, self._runtime.tokenizer, inputs.no_media)

    async def _pool(self, request: PoolingRequest) -> tuple[Vectors, int]:
        """Return the vectors of the only input, and its number of tokens."""
        request = msgspec.structs.replace(request, inputs=[self._placed(prompt) for prompt in request.inputs])
        result, _ = await self._runtime.llm.run_pooling(request)
        vectors = result.outputs[0].pooling_output
        if vectors is None:
            raise TypeError("the output has no vector")
        return vectors, result.prompt_tokens


def request_output(prepared: Prepared, pieces: Sequence[Piece], *, request_id: str = "") -> RequestOutput:
    """Build the output of a prompt from the last piece of each sequence."""
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
    """Return the times of a request that ends now. ``arrival`` is in seconds since the Unix epoch."""
    first = [state.first_token_after for state in live.states if state.first_token_after is not None]
    return RequestMetrics(
        arrival_time=arrival,
        first_token_latency=min(first, default=None),
        latency=time.time() - arrival,
        num_generation_tokens=sum(state.text.num_tokens for state in live.states),
    )


def _cumulative(logprobs: Logprobs | None) -> float | None:
    """Return the sum of the chosen tokens' log-probabilities over all positions. The first entry of each position is
    the chosen token.
    """
    return None if logprobs is None else sum(logprobs.logprobs[first] for first in logprobs.offsets[:-1])


async def pieces(
    runtime: Runtime,
    prepared: Prepared,
    request_id: str,
    accepted: Callable[[Any], None] = lambda _: None,
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs of a request, as its output kind defines. The last output is ``finished``. Raises
    RequestFailed.

    The kinds are: all output so far, only new output of one sequence, or one output at the end. When the generator ends
    for any reason, the engine drops the request. ``accepted`` is called with the handle that can abort the request.
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
