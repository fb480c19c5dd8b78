"""Effect of faults on the streams of a run, as numbers and as a table."""

import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.table import Table

from tests.chaos.outcome import Difference, Outcome, difference
from tests.chaos.requests import Request

NAMES = {"refused": "refused by a frontend, sent to the next"}
Load = Sequence[Sequence[Request]]
Outcomes = Sequence[Sequence[Outcome]]


class Pair(msgspec.Struct, frozen=True):
    """A request with its outcomes without and with faults."""

    request: Request
    expected: Outcome
    got: Outcome


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of a run's requests with the same requests without faults. Times are in seconds. Quantiles are
    computed over requests.

    Attributes:
        streams: Number of streams.
        finished: Number of streams without failed requests.
        requests: Number of requests.
        refused: Requests that a frontend refused and that the client sent again.
        failed: Requests that ended with an error.
        duplicated: Requests that received a token twice.
        lost: Requests that lacked a token.
        differing: Requests with other differences: tokens, text, log-probabilities, finish reason or usage.
        extra: Additional time of a request compared with the run without faults.
        gap: Longest wait for a message, for requests with more than one message.
    """

    streams: int
    finished: int
    requests: int
    tokens: int
    refused: int
    failed: int
    duplicated: int
    lost: int
    differing: int
    extra_p50: float
    extra_p99: float
    gap_p50: float
    gap_p99: float
    undisturbed_gap_p50: float
    undisturbed_gap_p99: float
    errors: dict[str, int]
    examples: tuple[str, ...] = ()

    @property
    def harmed(self) -> int:
        """Number of requests whose outcomes differ from those without faults."""
        return self.failed + self.duplicated + self.lost + self.differing


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile ``share`` (0 to 1) of the values. Returns 0 without values."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def paired(load: Load, undisturbed: Outcomes, disturbed: Outcomes) -> list[Pair]:
    """Return the requests of a load, each with its outcomes in both runs."""
    return [
        Pair(request, expected, got)
        for requests, before, after in zip(load, undisturbed, disturbed, strict=True)
        for request, expected, got in zip(requests, before, after, strict=True)
    ]


def summarize(pairs: Sequence[Pair], *, streams: int, finished: int) -> Summary:
    """Return the summary of a run.

    Args:
        finished: Number of streams in which no request failed.
    """
    found = [difference(pair.expected, pair.got) for pair in pairs]
    whole = [pair for pair, wrong in zip(pairs, found, strict=True) if not wrong.failed]
    extra = [pair.got.seconds - pair.expected.seconds for pair in whole]
    gaps = [pair.got.largest_gap for pair in whole if pair.got.streamed]
    gaps_before = [pair.expected.largest_gap for pair in pairs if pair.expected.streamed]
    failures = [pair.got for pair, wrong in zip(pairs, found, strict=True) if wrong.failed]
    return Summary(
        streams=streams,
        finished=finished,
        requests=len(pairs),
        tokens=sum(pair.got.num_tokens for pair in pairs),
        refused=sum(bool(pair.got.refusals) for pair in pairs),
        failed=len(failures),
        duplicated=sum(bool(wrong.duplicated) for wrong in found),
        lost=sum(bool(wrong.lost) for wrong in found),
        differing=sum(bool(wrong.differing) for wrong in found),
        extra_p50=quantile(extra, 0.5),
        extra_p99=quantile(extra, 0.99),
        gap_p50=quantile(gaps, 0.5),
        gap_p99=quantile(gaps, 0.99),
        undisturbed_gap_p50=quantile(gaps_before, 0.5),
        undisturbed_gap_p99=quantile(gaps_before, 0.99),
        errors=dict(Counter(f"{got.error}: {got.message:.100}" for got in failures)),
        examples=tuple(_example(pair, wrong) for pair, wrong in zip(pairs, found, strict=True) if wrong)[:12],
    )


def _example(pair: Pair, wrong: Difference) -> str:
    parts = [f"{pair.got.error} ({pair.got.message:.80})"] if wrong.failed else list(wrong.differing)
    parts += [f"{wrong.duplicated} tokens twice"] if wrong.duplicated else []
    parts += [f"{wrong.lost} tokens lost"] if wrong.lost else []
    return f"{pair.request.kind}: {'; '.join(parts)}"


def table(title: str, rows: dict[str, Summary]) -> Table:
    """Return a table with one column per run."""
    made = Table(title=title)
    made.add_column("")
    for name in rows:
        made.add_column(name, justify="right")
    made.add_row("streams finished", *(f"{s.finished} of {s.streams}" for s in rows.values()))
    for name in ("requests", "tokens", "refused", "failed", "duplicated", "lost", "differing"):
        made.add_row(NAMES.get(name, name), *(str(getattr(s, name)) for s in rows.values()))
    for name, what in (
        ("extra", "extra latency"),
        ("gap", "longest gap"),
        ("undisturbed_gap", "longest gap, undisturbed"),
    ):
        cells = (f"{getattr(s, f'{name}_p50'):.2f}, {getattr(s, f'{name}_p99'):.2f}" for s in rows.values())
        made.add_row(f"{what}, s: p50, p99", *cells)
    return made
