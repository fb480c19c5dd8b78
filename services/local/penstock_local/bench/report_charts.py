"""What a benchmark's page draws: how latencies are spread, what came over time, and every request."""

import bisect
from collections.abc import Sequence

from penstock_local.bench import charts
from penstock_local.bench.charts import Chart
from penstock_local.bench.record import Record
from penstock_local.bench.report import Latencies, Report, percentile
from penstock_local.bench.slices import cut

_SLICES = 60
_DRAWN = 400
"""Requests of which the timeline has a bar; of more it has some, evenly chosen."""
_SHARES = (*range(100), 99.5, 99.9, 100)


def report_charts(records: Sequence[Record], report: Report) -> Sequence[Chart]:
    """The charts, in the order in which they are read."""
    good = [record for record in records if record.ok]
    ttft = [record.ttft for record in good if record.ttft is not None]
    gaps = [gap for record in good for gap in record.gaps()]
    slices = cut(records, report.seconds, _SLICES)
    time = charts.axis(report.seconds, "seconds")
    tokens = charts.axis(max(slices.tokens_per_s), "output tokens/s", round_up=True)
    running = charts.axis(max(slices.running), "requests running", whole=True, round_up=True)
    return [
        *_spread("Time to first token", ttft, report.ttft_ms),
        *_spread("Time between tokens", gaps, report.itl_ms),
        Chart(
            title="Throughput",
            x=time,
            y=tokens,
            marks=[charts.steps("a area", time, tokens, slices.width, slices.tokens_per_s)],
            legend=[("a", f"{report.output_tokens_per_s:,.1f} output tokens/s on average")],
        ),
        Chart(
            title="Concurrency",
            x=time,
            y=running,
            marks=[charts.steps("b area", time, running, slices.width, slices.running)],
            legend=[("b", f"at most {report.peak_streams}")],
        ),
        _timeline(records, report.seconds),
    ]


def _spread(title: str, seconds: Sequence[float], numbers: Latencies | None) -> Sequence[Chart]:
    """The share of values up to each latency; none where there are no values."""
    if numbers is None:
        return []
    ordered = sorted(value * 1e3 for value in seconds)
    # The few slowest would squeeze the rest to the left: the chart ends where they begin.
    x = charts.axis(min(numbers.max, 2 * numbers.p99), "ms", ticks=6)
    y = charts.axis(100, "% of all, up to", round_up=True)
    points = [(ordered[0], 0.0), *((percentile(ordered, share), float(share)) for share in _SHARES)]
    shown = [(value, share) for value, share in points if value <= x.end]
    shown.append((x.end, 100 * bisect.bisect_right(ordered, x.end) / len(ordered)))
    marks = [charts.mark(name, x, getattr(numbers, name)) for name in ("p50", "p90", "p99")]
    return [
        Chart(
            title=title,
            x=x,
            y=y,
            marks=[*marks, charts.line("a", x, y, shown)],
            legend=[(name, f"{name} {getattr(numbers, name):,.1f} ms") for name in ("p50", "p90", "p99")]
            + [("", f"max {numbers.max:,.1f} ms")],
        )
    ]


def _timeline(records: Sequence[Record], seconds: float) -> Chart:
    """Every request from when it was sent to its end, oldest at the top."""
    every = -(-len(records) // _DRAWN) or 1
    drawn = [(number, record) for number, record in enumerate(records, start=1)][::every]
    x, y = charts.axis(seconds, "seconds"), charts.axis(len(records), "requests ended", whole=True)
    pixels = min(440, max(150, 9 * len(drawn)))
    thick = min(7.0, max(1.0, 0.7 * pixels / max(len(drawn), 1)))
    good = [(y.end - number + 0.5, record) for number, record in drawn if record.ok]
    bad = [(record.start, record.end, y.end - number + 0.5) for number, record in drawn if not record.ok]
    waits = [(record.start, record.start + (record.ttft or record.latency), at) for at, record in good]
    streams = [(record.times[0], record.end, at) for at, record in good if record.times]
    legend = [("b", "until the first token"), ("a", "until the end")] + ([("bad", "failed")] if bad else [])
    title = "Requests" if every == 1 else f"Requests, one of {every}"
    return Chart(
        title=title,
        x=x,
        y=charts.Axis(y.end, [], "oldest first"),
        marks=[
            charts.bars(kind, x, y, spans, pixels=thick)
            for kind, spans in (("b", waits), ("a", streams), ("bad", bad))
            if spans
        ],
        legend=legend,
        pixels=pixels,
    )
