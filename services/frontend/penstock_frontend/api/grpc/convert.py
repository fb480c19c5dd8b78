"""Messages of the public API to the domain and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.common.v1 import finish_pb2, logprobs_pb2, sampling_pb2, stats_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument, RequestFailed
from penstock_common.rpc.outputs import logprobs_to_proto, prompt_embeds_from_proto
from penstock_common.rpc.sampling import refuse_set, set_fields
from penstock_common.types.logprobs import Logprobs
from penstock_frontend.api.grpc.context import context_of
from penstock_frontend.config import LimitsConfig
from penstock_frontend.processing.prompts.counts import check_count
from penstock_frontend.processing.prompts.mixed_prompt import MixedPrompt, Part
from penstock_frontend.processing.prompts.request import Finish, GenerateRequest, RequestOutput, Usage
from penstock_frontend.processing.prompts.sampling import check_lists


def generate_request(
    message: pb.GenerateRequest, *, metadata: Mapping[str, str], time_left: float | None, limits: LimitsConfig
) -> GenerateRequest:
    """The domain's request. ``time_left``: seconds until the call's deadline.

    Raises Unimplemented for fields of later features, InvalidArgument for what cannot be read and for lists that are too long.
    """
    refuse_set(message, ("lora",))
    check_count("mixed.parts", len(message.mixed.parts), limits, "max_prompt_parts")
    check_lists(message.sampling_params, limits)
    return GenerateRequest(
        prompt=_prompt(message),
        sampling=sampling(message.sampling_params),
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
        context=context_of(message, metadata, time_left),
    )


def _prompt(message: pb.GenerateRequest) -> str | Sequence[int] | MixedPrompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return message.token_ids.ids
        case "embeds":
            return MixedPrompt((prompt_embeds_from_proto(message.embeds, path="embeds"),), ("embeds",))
        case "mixed":
            parts = [_part(part, f"mixed.parts[{i}]") for i, part in enumerate(message.mixed.parts)]
            return MixedPrompt(tuple(part for part, _ in parts), tuple(field for _, field in parts))
        case _:
            raise InvalidArgument("prompt is not set: give text, token_ids, embeds or mixed", field="prompt")


def _part(message: pb.PromptPart, path: str) -> tuple[Part, str]:
    """The part and the path of its field."""
    match message.WhichOneof("part"):
        case "text":
            return message.text, f"{path}.text"
        case "token_ids":
            return message.token_ids.ids, f"{path}.token_ids.ids"
        case "embeds":
            return prompt_embeds_from_proto(message.embeds, path=f"{path}.embeds"), f"{path}.embeds"
        case _:
            raise InvalidArgument(f"{path} is not set: give text, token_ids or embeds", field=path)


def sampling(params: sampling_pb2.SamplingParams) -> dict[str, Any]:
    """The sampling parameters that are set, by the domain's names. Raises InvalidArgument."""
    return set_fields(params)


def generate_response(output: RequestOutput, request_id: str) -> pb.GenerateResponse:
    """The message for a piece of output."""
    message = pb.GenerateResponse(
        request_id=request_id,
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        logprobs=logprobs(output.logprobs),
        prompt_logprobs=logprobs(output.prompt_logprobs),
    )
    if output.finish is not None:
        add_finish(message, output.finish)
    return message


def logprobs(values: Logprobs | None) -> logprobs_pb2.Logprobs | None:
    """The message for log-probabilities, where there are some."""
    return None if values is None else logprobs_to_proto(values)


def add_finish(message: pb.GenerateResponse | pb.ChatResponse, finish: Finish) -> None:
    """Say in the last message of a sequence how it ended."""
    message.finish_reason = finish_pb2.FinishReason.ValueType(finish.reason)
    if isinstance(finish.stop_reason, str):
        message.stop_reason.text = finish.stop_reason
    elif finish.stop_reason is not None:
        message.stop_reason.token_id = finish.stop_reason
    message.usage.CopyFrom(usage(finish.usage))


def usage(counts: Usage) -> stats_pb2.Usage:
    """The message for token counts."""
    return stats_pb2.Usage(
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        completion_tokens=counts.completion_tokens,
    )


def request_error(error: RequestFailed) -> finish_pb2.RequestError:
    """The message for an error of one request among many."""
    message = finish_pb2.RequestError(code=error.code, message=error.message, field=error.field, reason=error.reason)
    if error.retry_after is not None:
        message.retry_after = error.retry_after
    return message
