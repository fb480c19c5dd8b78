"""Parts of messages: predictions of requests; log-probabilities, ends and counts of answers."""

from penstock.common.v1 import finish_pb2, logprobs_pb2, stats_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.rpc.outputs import logprobs_to_proto
from penstock_common.types.logprobs import Logprobs
from penstock_frontend.call_types import Finish, Prediction, Usage


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
        accepted_draft_tokens=counts.accepted_draft_tokens,
        rejected_draft_tokens=counts.rejected_draft_tokens,
        media_tokens={str(modality): count for modality, count in counts.media_tokens.items()},
    )


def prediction_of(message: pb.GenerateRequest | pb.ChatRequest) -> Prediction | None:
    """What the output may turn out to be, where that is said. Raises InvalidArgument for an empty message."""
    if not message.HasField("prediction"):
        return None
    match message.prediction.WhichOneof("content"):
        case "text":
            return message.prediction.text
        case "token_ids":
            return message.prediction.token_ids.ids
        case _:
            raise InvalidArgument("prediction is not set: give text or token_ids", field="prediction")
