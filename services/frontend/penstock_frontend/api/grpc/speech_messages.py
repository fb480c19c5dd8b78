"""Conversion between ``penstock.inference.v1`` messages and domain types, for the call Transcribe."""

from collections.abc import Mapping

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.rpc.by_field import to_message
from penstock_frontend.api.grpc.message_parts import context_of
from penstock_frontend.speech.types import TEMPERATURES, SpeechTask, TextDelta, Transcript, TranscriptionRequest

_NUMBERS = {
    SpeechTask.TRANSCRIBE: pb.SPEECH_TASK_TRANSCRIBE,
    SpeechTask.TRANSLATE: pb.SPEECH_TASK_TRANSLATE,
}
_TASKS = {pb.SPEECH_TASK_UNSPECIFIED: SpeechTask.TRANSCRIBE} | {number: task for task, number in _NUMBERS.items()}


def transcription_request(
    message: pb.TranscribeRequest, *, metadata: Mapping[str, str], time_left: float | None
) -> TranscriptionRequest:
    """Return the request of a message as a domain type. ``time_left`` is the number of seconds until the call's
    deadline.

    Raises InvalidArgument for fields that are not valid.
    """
    if not message.audio:
        raise InvalidArgument("audio is empty; send the bytes of an audio file", field="audio")
    if (task := _TASKS.get(message.task)) is None:
        known = " or ".join(f"{number} ({each})" for each, number in _NUMBERS.items())
        raise InvalidArgument(f"task is {message.task}; it must be {known}", field="task")
    return TranscriptionRequest(
        audio=message.audio,
        field="audio",
        task=task,
        language=message.language,
        prompt=message.prompt,
        temperatures=tuple(message.temperatures) or TEMPERATURES,
        segments=message.segments,
        seed=message.seed if message.HasField("seed") else None,
        context=context_of(message, metadata, time_left),
    )


def transcribe_response(item: TextDelta | Transcript) -> pb.TranscribeResponse:
    """Return the message for an item of a transcription stream."""
    if isinstance(item, TextDelta):
        return pb.TranscribeResponse(text=item.text)
    return pb.TranscribeResponse(transcript=to_message(item, pb.Transcript, task=_NUMBERS[item.task]))
