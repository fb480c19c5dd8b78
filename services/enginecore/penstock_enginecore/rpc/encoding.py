"""A step's outputs as a frame, whatever is in them: what cannot be encoded ends its request alone."""

from typing import NamedTuple

import msgspec

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.observability.incidents import incident
from penstock_common.types.kv_events import KvCacheEvent
from penstock_common.types.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    RequestError,
    UtilityOutput,
)
from penstock_enginecore.rpc import convert


class Encoded(NamedTuple):
    """What is said, and its frame. ``broken``: ids of requests that end here, since an output of theirs cannot be encoded."""

    outputs: EngineCoreOutputs
    frame: pb.EngineCoreOutputs
    broken: list[str]


def encoded(outputs: EngineCoreOutputs) -> Encoded:
    """The frame. In place of an output that cannot be encoded it has the end of that request, and of a call its failure; cache
    events that cannot be encoded are left out.
    """
    try:
        return Encoded(outputs, convert.outputs_to_proto(outputs), [])
    except Exception:
        sendable = msgspec.structs.replace(
            outputs,
            outputs=[_sendable(output) for output in outputs.outputs],
            utility_output=None if outputs.utility_output is None else _sendable_answer(outputs.utility_output),
            kv_events=_sendable_events(outputs.kv_events),
        )
    changed = [new.request_id for old, new in zip(outputs.outputs, sendable.outputs, strict=True) if new is not old]
    return Encoded(sendable, convert.outputs_to_proto(sendable), changed)


def unsendable(output: EngineCoreOutput, error: Exception) -> EngineCoreOutput:
    """The end of a request whose output cannot be encoded."""
    failed = incident(error, request=output.request_id, doing="encoding an output of the request")
    return EngineCoreOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        offset=output.offset,
        finish_reason=FinishReason.ERROR,
        error=RequestError.from_exception(failed),
    )


def _sendable(output: EngineCoreOutput) -> EngineCoreOutput:
    try:
        convert.output_to_proto(output)
    except Exception as e:
        return unsendable(output, e)
    return output


def _sendable_answer(answer: UtilityOutput) -> UtilityOutput:
    try:
        convert.utility_to_proto(answer)
    except Exception as e:
        failed = incident(e, request="", doing="encoding the answer of a utility call")
        return UtilityOutput(call_id=answer.call_id, error=RequestError.from_exception(failed))
    return answer


def _sendable_events(events: list[KvCacheEvent]) -> list[KvCacheEvent]:
    try:
        convert.outputs_to_proto(EngineCoreOutputs(kv_events=events))
    except Exception as e:
        incident(e, request="", doing="encoding cache events")
        return []
    return events
