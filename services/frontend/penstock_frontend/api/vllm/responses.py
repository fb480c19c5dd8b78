"""The domain's outputs and vectors as messages of ``vllm.grpc.engine``."""

from collections.abc import Iterator, Sequence

import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from penstock_common.rpc import outputs as parts
from penstock_common.types.logprobs import Logprobs
from penstock_frontend.call_types import Finish, GenerateRequest, PoolingResult, RequestOutput
from penstock_frontend.calls.live_request import LiveRequest
from penstock_frontend.dispatch.kv_transfer_params import answer_of


def embed_response(result: PoolingResult) -> pb.EmbedResponse:
    """The message for one embedded input. Raises TypeError for a result without a vector."""
    (output,) = result.outputs
    if output.pooling_output is None:
        raise TypeError("an output without vectors is no answer")
    embedding = parts.floats(output.pooling_output)
    return pb.EmbedResponse(embedding=embedding, prompt_tokens=result.prompt_tokens, embedding_dim=len(embedding))


class GenerateResponses:
    """The messages for the outputs of one call.

    Streamed, each output is a chunk with what is new, and the last of each sequence is followed by its ``complete``, which
    repeats the tokens of that last chunk and has the counts of the whole. Otherwise there are only the ``complete``s, with
    everything. The prompt's log-probabilities come with the first message of sequence 0.
    """

    def __init__(self, request: GenerateRequest, live: LiveRequest, *, stream: bool) -> None:
        self._live = live
        self._stream = stream
        self._top: int | None = request.sampling["logprobs"]
        self._prompt_top: int | None = request.sampling["prompt_logprobs"]

    def of(self, output: RequestOutput) -> Iterator[pb.GenerateResponse]:
        """The messages for an output."""
        if self._stream:
            yield pb.GenerateResponse(chunk=self._chunk(output))
        if output.finish is not None:
            yield pb.GenerateResponse(complete=self._complete(output, output.finish))

    def _chunk(self, output: RequestOutput) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            token_ids=output.token_ids,
            prompt_tokens=len(self._live.prompt_token_ids),
            completion_tokens=len(output.token_ids),
            cached_tokens=self._live.states[output.index].num_cached,
            output_logprobs=_output_logprobs(output.logprobs, self._top),
            input_logprobs=_input_logprobs(output.prompt_logprobs, self._live.prompt_token_ids, self._prompt_top),
            index=output.index,
        )

    def _complete(self, output: RequestOutput, finish: Finish) -> pb.GenerateComplete:
        prompt_logprobs = None if self._stream else output.prompt_logprobs
        complete = pb.GenerateComplete(
            output_ids=output.token_ids,
            finish_reason=finish.reason.name.lower(),
            prompt_tokens=finish.usage.prompt_tokens,
            completion_tokens=finish.usage.completion_tokens,
            cached_tokens=finish.usage.cached_tokens,
            output_logprobs=_output_logprobs(output.logprobs, self._top),
            input_logprobs=_input_logprobs(prompt_logprobs, self._live.prompt_token_ids, self._prompt_top),
            index=output.index,
        )
        if (said := answer_of(finish)) is not None:
            complete.kv_transfer_params_json = msgspec.json.encode(said).decode()
        if isinstance(finish.stop_reason, str):
            complete.matched_stop_str = finish.stop_reason
        elif finish.stop_reason is not None:
            complete.matched_token_id = finish.stop_reason
        return complete


def _output_logprobs(logprobs: Logprobs | None, top: int | None) -> pb.OutputLogProbs | None:
    if logprobs is None:
        return None
    starts = logprobs.offsets[:-1]
    return pb.OutputLogProbs(
        token_logprobs=[logprobs.logprobs[start] for start in starts],
        token_ids=[logprobs.token_ids[start] for start in starts],
        top_logprobs=_top_logprobs(logprobs) if top else (),
    )


def _input_logprobs(
    logprobs: Logprobs | None, prompt_token_ids: Sequence[int], top: int | None
) -> pb.InputLogProbs | None:
    """One position per prompt token; the first has no log-probability."""
    if logprobs is None:
        return None
    values = [pb.InputTokenLogProb(value=logprobs.logprobs[start]) for start in logprobs.offsets[:-1]]
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *values],
        token_ids=prompt_token_ids[: len(values) + 1],
        top_logprobs=[pb.TopLogProbs(), *_top_logprobs(logprobs)] if top else (),
    )


def _top_logprobs(logprobs: Logprobs) -> list[pb.TopLogProbs]:
    """The likeliest tokens of each position: its entries but the first, which is the chosen token."""
    return [
        pb.TopLogProbs(values=logprobs.logprobs[start + 1 : stop], token_ids=logprobs.token_ids[start + 1 : stop])
        for start, stop in zip(logprobs.offsets, logprobs.offsets[1:], strict=False)
    ]
