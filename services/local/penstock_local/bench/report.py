"""Results of a benchmark, computed from the request records: numbers, time slices, JSON schema checks, tables and JSON."""

import functools
import json
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from penstock_local.bench.options import BenchOptions

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


class Record(msgspec.Struct, kw_only=True):
    """Measurements of one request. Times are seconds since the load began."""

    start: float
    end: float = 0.0
    code: str = ""
    """Status code of the request: empty while the request runs, then OK or the name of an error code."""
    message: str = ""
    """Message of the error, if the request failed."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    accepted_draft_tokens: int = 0
    """Number of output tokens that were drafted."""
    rejected_draft_tokens: int = 0
    """Number of drafted tokens that were rejected."""
    schema: str = ""
    """JSON schema that the answer must match; empty if there is no schema."""
    text: str = ""
    """Text of the answer. It is stored only if the request has a schema."""
    problem: str = ""
    """Reason why the answer does not match its schema; empty if the answer matches or was not checked."""
    times: "array[float]" = msgspec.field(default_factory=lambda: array("d"))
    """Arrival time of each message with tokens."""
    sizes: "array[int]" = msgspec.field(default_factory=lambda: array("l"))
    """Number of tokens in each message with tokens."""

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return self.code == "OK"

    @property
    def num_tokens(self) -> int:
        """Number of tokens received."""
        return sum(self.sizes)

    @property
    def ttft(self) -> float | None:
        """Seconds from the request to the first token, or None if no token was received."""
        return self.times[0] - self.start if self.times else None

    @property
    def latency(self) -> float:
        """Seconds from the request to its end."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first message, or None if later messages have no tokens."""
        later = sum(self.sizes[1:])
        return (self.times[-1] - self.times[0]) / later if later else None

    def gaps(self) -> list[float]:
        """Return the seconds between consecutive tokens. The wait for a message is divided evenly among its tokens."""
        gaps: list[float] = []
        for before, now, size in zip(self.times, self.times[1:], self.sizes[1:], strict=False):
            gaps.extend([(now - before) / size] * size)
        return gaps


class Slices(msgspec.Struct, frozen=True):
    """Time slices of a run, with one value per slice.

    Attributes:
        width: Width of a slice in seconds.
        middles: Middle of each slice, in seconds since the load began.
        tokens_per_s: Output tokens per second in each slice.
        running: Number of running requests at the middle of each slice.
    """

    width: float
    middles: Sequence[float]
    tokens_per_s: Sequence[float]
    running: Sequence[int]


def cut(records: Sequence[Record], seconds: float, count: int) -> Slices:
    """Cut a run of ``seconds`` into ``count`` slices."""
    width = seconds / count
    tokens, changes = [0] * count, [0] * (count + 1)
    for record in records:
        for time, size in zip(record.times, record.sizes, strict=True):
            tokens[min(int(time / width), count - 1)] += size
        changes[_next_middle(record.start, width, count)] += 1
        changes[_next_middle(record.end, width, count)] -= 1
    running, now = [], 0
    for change in changes[:count]:
        now += change
        running.append(now)
    return Slices(width, [(index + 0.5) * width for index in range(count)], [each / width for each in tokens], running)


def _next_middle(time: float, width: float, count: int) -> int:
    """Return the first slice whose middle is at or after ``time``, or ``count`` if no slice has such a middle."""
    return min(max(math.ceil(time / width - 0.5), 0), count)


# ``jsonschema`` is imported only to check answers, so benchmarks without schemas do not need it.

_LONGEST = 200
"""Maximum length, in characters, of a problem's description. The validator quotes the complete value."""


class JsonAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of successful answers with a schema: all answers, valid JSON answers, and answers that match their
    schema.
    """

    answers: int
    parse: int
    validate: int


def check_answers(records: Sequence[Record]) -> JsonAnswers | None:
    """Check the answers, and set ``problem`` of each wrong record. Returns None if no request had a schema."""
    asked = [record for record in records if record.schema and record.ok]
    if not any(record.schema for record in records):
        return None
    parse = 0
    for record in asked:
        try:
            value = json.loads(record.text)
        except ValueError as e:
            record.problem = f"not valid JSON: {e}"
            continue
        parse += 1
        error = next(_validator(record.schema).iter_errors(value), None)
        record.problem = f"{error.json_path}: {error.message}"[:_LONGEST] if error is not None else ""
    return JsonAnswers(answers=len(asked), parse=parse, validate=sum(not record.problem for record in asked))


def schema_problem(schema: Any) -> str:
    """Return the reason why ``schema`` is not a valid JSON schema, or an empty string."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as e:
        return f"{e.json_path}: {e.message}"[:_LONGEST]
    return ""


@functools.cache
def _validator(schema: str) -> "Validator":
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    parsed = json.loads(schema)
    return validator_for(parsed, default=Draft202012Validator)(parsed)


PERCENTILES = (50, 90, 99)
_BUSY = 0.8
"""Fraction of a core above which the client itself may limit the results."""


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of one kind of latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a benchmark. Rates are per second of the run, from the first request to the end of the last request.

    A failed request counts in ``requests`` and ``failures``, and its received tokens count as output tokens.
    """

    seconds: float
    requests: int
    succeeded: int
    failures: dict[str, int]
    """Number of failed requests by status code."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    accepted_draft_tokens: int
    """Number of output tokens that were drafted."""
    rejected_draft_tokens: int
    """Number of drafted tokens that were rejected."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    peak_streams: int
    """Maximum number of requests that ran at the same time."""
    cpu_share: float
    """Processor time of the client, as a share of one core."""
    ttft_ms: Latencies | None
    """Time from a request to its first token."""
    itl_ms: Latencies | None
    """Time between two tokens of a request."""
    tpot_ms: Latencies | None
    """Mean time per token of a request after its first message."""
    e2e_ms: Latencies | None
    """Time from a request to its end."""
    json_answers: JsonAnswers | None = None
    """Schema checks of requests with a JSON schema; None if there were none."""

    @property
    def draft_acceptance(self) -> float | None:
        """Fraction of the drafted tokens that were accepted, or None if no tokens were drafted."""
        drafted = self.accepted_draft_tokens + self.rejected_draft_tokens
        return self.accepted_draft_tokens / drafted if drafted else None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean number of output tokens per request and step, or None if no tokens were drafted, because the mean is
        then always 1.
        """
        steps = self.output_tokens - self.accepted_draft_tokens
        return self.output_tokens / steps if self.draft_acceptance is not None and steps else None

    @property
    def client_is_busy(self) -> bool:
        """Whether the client used so much of its core that it may have slowed the measurement."""
        return self.cpu_share > _BUSY


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ascending values, with linear interpolation."""
    position = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return low + (high - low) * (position - math.floor(position))


def latencies(seconds: Sequence[float]) -> Latencies | None:
    """Return the distribution in milliseconds, or None if there are no values."""
    if not seconds:
        return None
    ordered = sorted(value * 1e3 for value in seconds)
    p50, p90, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return Latencies(mean=math.fsum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1])


def make_report(
    records: Sequence[Record], *, seconds: float, cpu_seconds: float, json_answers: JsonAnswers | None = None
) -> Report:
    """Compute the results of a run that took ``seconds``."""
    good = [record for record in records if record.ok]
    output = sum(record.num_tokens for record in records)
    prompt = sum(record.prompt_tokens for record in good)
    return Report(
        seconds=seconds,
        requests=len(records),
        succeeded=len(good),
        failures=dict(Counter(record.code for record in records if not record.ok)),
        prompt_tokens=prompt,
        cached_tokens=sum(record.cached_tokens for record in good),
        output_tokens=output,
        accepted_draft_tokens=sum(record.accepted_draft_tokens for record in good),
        rejected_draft_tokens=sum(record.rejected_draft_tokens for record in good),
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(output + prompt) / seconds,
        peak_streams=_peak(records),
        cpu_share=cpu_seconds / seconds,
        ttft_ms=latencies([record.ttft for record in good if record.ttft is not None]),
        itl_ms=latencies([gap for record in good for gap in record.gaps()]),
        tpot_ms=latencies([record.tpot for record in good if record.tpot is not None]),
        e2e_ms=latencies([record.latency for record in good]),
        json_answers=json_answers,
    )


def _peak(records: Sequence[Record]) -> int:
    """Return the maximum number of requests that ran at the same time."""
    changes = sorted([(r.start, 1) for r in records] + [(r.end, -1) for r in records])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def summary_table(report: Report) -> Table:
    """Return the throughput table for the terminal."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in summary_rows(report).items():
        table.add_row(name, value)
    return table


def summary_rows(report: Report) -> Mapping[str, str]:
    """Return the rows of the throughput table."""
    cached = f" ({report.cached_tokens:,} cached)" if report.cached_tokens else ""
    rows = {
        "requests": f"{report.succeeded} of {report.requests} in {report.seconds:.2f} s",
        "requests/s": f"{report.requests_per_s:.2f}",
        "output tokens/s": f"{report.output_tokens_per_s:.1f}",
        "all tokens/s": f"{report.total_tokens_per_s:.1f}",
        "tokens": f"{report.prompt_tokens:,} prompt{cached}, {report.output_tokens:,} output",
        "most at once": str(report.peak_streams),
        "this client": f"{report.cpu_share:.0%} of a core",
    }
    if report.draft_acceptance is not None and report.tokens_per_step is not None:
        drafted = report.accepted_draft_tokens + report.rejected_draft_tokens
        rows["drafts"] = (
            f"{report.accepted_draft_tokens:,} of {drafted:,} tokens accepted ({report.draft_acceptance:.0%}), "
            f"{report.tokens_per_step:.2f} tokens/step"
        )
    if (found := report.json_answers) is not None:
        rows["JSON"] = f"{found.parse} of {found.answers} answers parse, {found.validate} follow their schema"
    return rows


def latency_table(report: Report) -> Table:
    """Return the latency table in milliseconds."""
    table = Table("ms", box=None, pad_edge=False, header_style="dim")
    for column in Latencies.__struct_fields__:
        table.add_column(column, justify="right")
    for name, values in latency_rows(report).items():
        table.add_row(name, *values)
    return table


def latency_rows(report: Report) -> Mapping[str, Sequence[str]]:
    """Return the rows of the latency table: for each measured kind, the fields of Latencies in milliseconds."""
    kinds: Mapping[str, Latencies | None] = {
        "time to first token": report.ttft_ms,
        "between tokens": report.itl_ms,
        "per token after the first": report.tpot_ms,
        "whole request": report.e2e_ms,
    }
    return {
        name: [f"{value:,.1f}" for value in msgspec.structs.astuple(values)]
        for name, values in kinds.items()
        if values is not None
    }


def as_json(options: BenchOptions, report: Report, records: Sequence[Record]) -> dict[str, Any]:
    """Return options, results and every request as plain data. Times are in seconds, or in ms if the name ends in
    ``ms``.
    """
    return {
        "options": msgspec.to_builtins(options),
        "results": {
            **msgspec.to_builtins(report),
            "draft_acceptance": report.draft_acceptance,
            "tokens_per_step": report.tokens_per_step,
        },
        "requests": [
            {
                "start": record.start,
                "latency": record.latency,
                "ttft": record.ttft,
                "tpot": record.tpot,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "output_tokens": record.num_tokens,
                "accepted_draft_tokens": record.accepted_draft_tokens,
                "rejected_draft_tokens": record.rejected_draft_tokens,
                "code": record.code,
                **({"message": record.message} if record.message else {}),
                **({"problem": record.problem} if record.problem else {}),
            }
            for record in records
        ],
    }
