"""``penstock generate``: the continuation of one prompt, in the terminal as it is made."""

import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock_common.errors import RequestFailed
from penstock_common.types.outputs import FinishReason
from penstock_local.console import dim, fail
from penstock_local.rpc.client import InferenceClient, Piece, ServerUnreachableError

EXIT_FAILED = 1


class GenerateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and how to continue it. ``sampling`` holds fields of SamplingParams, ``timeout`` is in seconds."""

    prompt: str
    address: str
    model: str = ""
    timeout: float | None = None
    sampling: Mapping[str, Any] = {}


async def generate(options: GenerateOptions) -> int:
    """Write the text to standard output as it comes and a line about it to standard error. Returns the exit code."""
    started = time.monotonic()
    last: Piece | None = None
    try:
        async with InferenceClient(options.address) as client:
            async for piece in client.generate(
                options.prompt, model=options.model, deadline=options.timeout, **options.sampling
            ):
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                last = piece
    except ServerUnreachableError as e:
        _end_line(last)
        fail(str(e) if last else f"{e}\nIs a server running? Start one with: penstock serve MODEL")
        return EXIT_FAILED
    except RequestFailed as e:
        _end_line(last)
        fail(describe_failure(e))
        return EXIT_FAILED
    _end_line(last)
    if last is not None:
        sys.stderr.write(dim(describe_end(last, seconds=time.monotonic() - started)) + "\n")
    return 0


def describe_failure(error: RequestFailed) -> str:
    """The server's message with the field at fault, if one is, and when to try again."""
    field = f" ({error.field})" if error.field and error.field not in error.message else ""
    retry = f"; try again in {error.retry_after:g} s" if error.retry_after is not None else ""
    return f"{error.code}: {error.message}{field}{retry}"


def describe_end(last: Piece, *, seconds: float) -> str:
    """One line on how the output ended, what it cost and how fast it was."""
    reason = last.finish_reason.name.lower() if last.finish_reason is not None else "no finish reason"
    if last.finish_reason is FinishReason.STOP and last.stopped_at is not None:
        reason = f"stop at {last.stopped_at!r}"
    if last.usage is None:
        return f"[{reason}]"
    cached = f" ({last.usage.cached_tokens} cached)" if last.usage.cached_tokens else ""
    rate = last.usage.completion_tokens / max(seconds, 1e-9)
    return (
        f"[{reason} · {last.usage.prompt_tokens} prompt tokens{cached} · {last.usage.completion_tokens} new tokens"
        f" · {seconds:.2f} s · {rate:.0f} tokens/s]"
    )


def _end_line(last: Piece | None) -> None:
    """Close the line of output that has been written."""
    if last is not None:
        sys.stdout.write("\n")
        sys.stdout.flush()
