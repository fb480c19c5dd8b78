"""Generate and its session: messages to the domain and back."""

from collections.abc import Mapping, Sequence

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.rpc.outputs import prompt_embeds_from_proto
from penstock_common.rpc.sampling import set_fields
from penstock_frontend.api.grpc.context import context_of
from penstock_frontend.api.grpc.media_messages import mixed_prompt
from penstock_frontend.api.grpc.message_parts import add_finish, logprobs, prediction_of
from penstock_frontend.call_types import GenerateRequest, MixedPrompt, RequestOutput
from penstock_frontend.config import LimitsConfig
from penstock_frontend.processing.prompts.sampling_params import check_lists


def generate_request(
    message: pb.GenerateRequest, *, metadata: Mapping[str, str], time_left: float | None, limits: LimitsConfig
) -> GenerateRequest:
    """The domain's request. ``time_left``: seconds until the call's deadline.

    Raises InvalidArgument for what cannot be read and for lists that are too long.
    """
    check_lists(message.sampling_params, limits)
    return GenerateRequest(
        prompt=_prompt(message, limits),
        sampling=set_fields(message.sampling_params),
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
        prediction=prediction_of(message),
        context=context_of(message, metadata, time_left),
    )


def _prompt(message: pb.GenerateRequest, limits: LimitsConfig) -> str | Sequence[int] | MixedPrompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return message.token_ids.ids
        case "embeds":
            return MixedPrompt((prompt_embeds_from_proto(message.embeds, path="embeds"),), ("embeds",))
        case "mixed":
            return mixed_prompt(message.mixed, "mixed", limits)
        case _:
            raise InvalidArgument("prompt is not set: give text, token_ids, embeds or mixed", field="prompt")


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
