"""Implementation of ``penstock transcribe``: writes the text of an audio file."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import msgspec

from penstock_client import Transcript
from penstock_client.requests import TranscribeOptions as Fields
from penstock_common.errors import ConfigError, RequestFailed
from penstock_frontend.speech import formats
from penstock_frontend.speech.types import Segment
from penstock_local.console import dim, fail
from penstock_local.rpc.client import ServerUnreachableError, client_of, describe_failure, unreachable

EXIT_FAILED = 1
TextFormat = Literal["text", "srt", "vtt", "json"]


class TranscribeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of ``penstock transcribe``."""

    file: str
    address: str
    model: str = ""
    """Name of the model; empty for the served model."""
    language: str = ""
    """Code or English name of the language; empty to let the model detect the language."""
    task: Literal["transcribe", "translate"] = "transcribe"
    format: TextFormat = "text"
    prompt: str = ""
    """Text before the speech, which guides style and spelling."""
    temperature: float | None = None
    """Only temperature to use; None for the server's temperatures."""
    seed: int | None = None
    timeout: float | None = None
    """Timeout of the whole request, in seconds; None for no limit."""

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"--timeout is {self.timeout:g}; it must be above 0 s")


async def transcribe(options: TranscribeOptions) -> int:
    """Write the transcript to standard output and a summary to standard error. Returns the exit code.

    The format ``text`` is written while it is received. The other formats are written when the transcript is complete.
    Raises ConfigError if the file cannot be read.
    """
    started = time.monotonic()
    audio = _read(options.file)
    transcript: Transcript | None = None
    begun = False
    try:
        async with client_of(options.address) as client:
            stream = client.stream_transcript(audio, timeout=options.timeout, **_fields(options))
            async for item in stream:
                if isinstance(item, Transcript):
                    transcript = item
                elif options.format == "text":
                    begun = True
                    _write(item)
    except ServerUnreachableError as e:
        fail(str(e) if begun else unreachable(e))
        return EXIT_FAILED
    except RequestFailed as e:
        fail(describe_failure(e))
        return EXIT_FAILED
    finally:
        if begun:
            _write("\n")
    if transcript is None:
        fail("the server ended the stream without a transcript")
        return EXIT_FAILED
    _write(_written(transcript, options.format))
    sys.stderr.write(dim(_summary(transcript, time.monotonic() - started)) + "\n")
    return 0


def _fields(options: TranscribeOptions) -> Fields:
    fields = Fields(
        model=options.model,
        language=options.language,
        task=options.task,
        prompt=options.prompt,
        segments=options.format != "text",
        seed=options.seed,
    )
    if options.temperature is not None:
        fields["temperatures"] = [options.temperature]
    return fields


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as e:
        raise ConfigError(f"{file} cannot be read: {e.strerror}") from None


def _written(transcript: Transcript, form: TextFormat) -> str:
    """Return the part of the output that is written when the transcript is complete."""
    if form == "text":
        return ""
    if form == "json":
        return json.dumps(asdict(transcript), ensure_ascii=False, indent=2) + "\n"
    segments = msgspec.convert(transcript.segments, list[Segment], from_attributes=True)
    return formats.subrip(segments) if form == "srt" else formats.webvtt(segments)


def _summary(transcript: Transcript, seconds: float) -> str:
    """Return one line about the length of the audio, the language, and the speed."""
    language = transcript.language or "no speech"
    speed = transcript.duration / max(seconds, 1e-9)
    return (
        f"[{language} · {transcript.duration:.1f} s of audio · {transcript.output_tokens} tokens · {seconds:.2f} s · "
        f"{speed:.1f} times real time]"
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
