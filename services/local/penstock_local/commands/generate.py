"""Implementation of ``penstock generate``: continues one prompt in the terminal."""

import itertools
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock_client import ChatOutput, Logprob, Output, SamplingParams
from penstock_common.errors import ConfigError, RequestFailed
from penstock_local.console import dim, fail
from penstock_local.media_files import MediaFile
from penstock_local.rpc.client import ServerUnreachableError, client_of, describe_failure, unreachable, with_media

_HEADER = ("token", "logprob", "rank", "likeliest")
Logprobs = Sequence[Sequence[Logprob]]
"""Entries per position. The first entry is the chosen token; the other entries are the most likely tokens."""
Piece = Output | ChatOutput


def logprobs_table(logprobs: Logprobs) -> Iterator[str]:
    """Yield the lines of a table: a header, then one line per position with the chosen token and the most likely
    tokens.
    """
    texts = any(entry.token for entries in logprobs for entry in entries)

    def token(entry: Logprob) -> str:
        """Return the text in quotes, so that spaces are visible, or the id if the server sends no texts."""
        return repr(entry.token) if texts else str(entry.token_id)

    def row(chosen: Logprob, *likeliest: Logprob) -> tuple[str, str, str, str]:
        others = "  ".join(f"{token(entry)} {entry.logprob:.2f}" for entry in likeliest)
        return token(chosen), f"{chosen.logprob:.4f}", str(chosen.rank), others

    rows = [_HEADER, *(row(*entries) for entries in logprobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, logprob, rank, likeliest in rows:
        yield f"{name:<{widths[0]}}  {logprob:>{widths[1]}}  {rank:>{widths[2]}}  {likeliest}".rstrip()


EXIT_FAILED = 1


class GenerateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of ``penstock generate``."""

    prompt: str
    address: str
    model: str = ""
    """Name of the model; empty for the served model."""
    lora: str = ""
    """Name of a LoRA adapter of the model; empty for none."""
    media: Collection[MediaFile] = ()
    """Images and audio before the prompt."""
    timeout: float | None = None
    """Timeout of the whole request, in seconds; None for no limit."""
    sampling: Mapping[str, Any] = {}
    """Given fields of SamplingParams. The server's defaults apply to the other fields."""

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"--timeout is {self.timeout:g}; it must be above 0 s")


class Continuation:
    """The received part of one output of a prompt."""

    def __init__(self) -> None:
        self.text = ""
        self.last: Output | None = None
        """Latest piece of the output."""
        self.logprobs: list[Sequence[Logprob]] = []

    @property
    def ended(self) -> bool:
        """Whether the output is complete."""
        return self.last is not None and self.last.finish_reason is not None

    def add(self, piece: Output) -> None:
        """Add the next piece."""
        self.text += piece.text
        self.last = piece
        self.logprobs += piece.logprobs or ()


async def generate(options: GenerateOptions) -> int:
    """Write the text to standard output and a summary to standard error. Returns the exit code.

    A single output is written while it is received. Several outputs are written in order, with their numbers. An output
    is written as soon as this output and all earlier outputs are complete. If log-probabilities are requested, a table
    of them is written to standard error.
    """
    started = time.monotonic()
    sequences = [Continuation() for _ in range(max(options.sampling.get("n", 1), 1))]
    num_written = 0
    try:
        async with client_of(options.address) as client:
            async for piece in client.stream(
                with_media(options.prompt, options.media),
                SamplingParams(**options.sampling),
                model=options.model,
                lora=options.lora,
                timeout=options.timeout,
            ):
                sequences[piece.index].add(piece)
                if len(sequences) == 1:
                    _write(piece.text)
                else:
                    num_written += _write_ended(sequences, num_written)
    except ServerUnreachableError as e:
        begun = _end_line(sequences)
        fail(str(e) if begun else unreachable(e))
        return EXIT_FAILED
    except RequestFailed as e:
        _end_line(sequences)
        fail(describe_failure(e))
        return EXIT_FAILED
    if _end_line(sequences):
        _write_about(sequences, seconds=time.monotonic() - started)
    return 0


def describe_end(ends: Collection[Piece], *, seconds: float) -> str:
    """Return one line about how the outputs ended, their token counts and their speed.

    ``ends`` has the last piece of each output.
    """
    reasons = Counter(_reason(end) for end in ends)
    if len(ends) == 1:
        reason = next(iter(reasons))
    else:
        reason = f"{len(ends)} outputs: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    usages = [end.usage for end in ends if end.usage is not None]
    if not usages:
        return f"[{reason}]"
    prompt, cached = usages[0].prompt_tokens, usages[0].cached_tokens
    new = sum(usage.completion_tokens for usage in usages)
    return (
        f"[{reason} · {prompt} prompt tokens{f' ({cached} cached)' if cached else ''} · {new} new tokens"
        f" · {seconds:.2f} s · {new / max(seconds, 1e-9):.0f} tokens/s]"
    )


def _reason(end: Piece) -> str:
    if end.finish_reason is None:
        return "no finish reason"
    if end.finish_reason == "stop" and end.stop_reason is not None:
        return f"stop at {end.stop_reason!r}"
    return end.finish_reason


def _write_ended(sequences: list[Continuation], start: int) -> int:
    """Write the complete outputs from ``start`` up to the first incomplete output. Returns the number of written
    outputs.
    """
    ended = list(itertools.takewhile(lambda sequence: sequence.ended, sequences[start:]))
    for number, sequence in enumerate(ended, start=start + 1):
        _write(f"[{number}] {sequence.text}\n")
    return len(ended)


def _write_about(sequences: list[Continuation], *, seconds: float) -> None:
    for number, sequence in enumerate(sequences, start=1):
        if sequence.logprobs:
            title = f"[{number}]\n" if len(sequences) > 1 else ""
            sys.stderr.write(title + "\n".join(logprobs_table(sequence.logprobs)) + "\n")
    ends = [sequence.last for sequence in sequences if sequence.last is not None]
    sys.stderr.write(dim(describe_end(ends, seconds=seconds)) + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _end_line(sequences: list[Continuation]) -> bool:
    """End the line if the text of a single output has been written. Returns whether any output was received."""
    if len(sequences) == 1 and sequences[0].last is not None:
        _write("\n")
    return any(sequence.last is not None for sequence in sequences)
