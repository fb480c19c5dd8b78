"""The results of a benchmark as a page: one file without scripts, which loads nothing."""

import bisect
import html
import importlib.resources
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from penstock_local.bench.options import BenchOptions
from penstock_local.bench.report import Latencies, Record, Report, cut, latency_rows, percentile, summary_rows

# Charts as HTML with inline SVG. They stay readable at any width: the drawing is stretched to the width there is; words
# stand around it as HTML, where they keep their size.

_SIDE = 1000
"""Width and height of every drawing in its own units."""


class Axis(msgspec.Struct, frozen=True):
    """From 0 to ``end``. ``ticks`` are the values that are written at it."""

    end: float
    ticks: Sequence[float]
    unit: str

    def along(self, value: float) -> str:
        """Where a value lies from the left; values behind the end lie at it."""
        return f"{min(max(value / self.end, 0), 1) * _SIDE:.1f}".removesuffix(".0")

    def up(self, value: float) -> str:
        """Where a value lies from the top of an axis that goes up."""
        return self.along(self.end - value)


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """``marks`` are SVG in the units of the axes' ``along`` and ``up``; ``legend`` has a class of marks and a text for each."""

    title: str
    x: Axis
    y: Axis
    marks: Sequence[str]
    legend: Sequence[tuple[str, str]] = ()
    pixels: int = 210


def axis(largest: float, unit: str, *, ticks: int = 5, whole: bool = False, round_up: bool = False) -> Axis:
    """An axis that shows values up to ``largest``, with about so many ticks at round values.

    ``whole``: only whole numbers are written; ``round_up``: it ends at a tick.
    """
    largest = largest if largest > 0 else 1.0
    step = _round_step(largest / ticks)
    if whole:
        step = max(1.0, step)
    count = math.ceil(largest / step - 1e-9) if round_up else math.floor(largest / step + 1e-9)
    values = [index * step for index in range(count + 1)]
    return Axis(values[-1] if round_up else largest, values, unit)


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is no smaller."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def line(kind: str, x: Axis, y: Axis, points: Iterable[tuple[float, float]]) -> str:
    """A line through points."""
    return f'<polyline class="{kind}" points="{" ".join(f"{x.along(a)},{y.up(b)}" for a, b in points)}"/>'


def steps(kind: str, x: Axis, y: Axis, width: float, values: Sequence[float]) -> str:
    """The outline of columns of the same width, which begin at 0, down to the axis."""
    corners = [(x.along(i * width + side), y.up(value)) for i, value in enumerate(values) for side in (0.0, width)]
    path = " ".join(f"L{a},{b}" for a, b in corners)
    return f'<path class="{kind}" d="M{x.along(0)},{y.up(0)} {path} L{corners[-1][0]},{y.up(0)}"/>'


def bars(kind: str, x: Axis, y: Axis, spans: Iterable[tuple[float, float, float]], *, pixels: float) -> str:
    """Horizontal bars: begin, end and height of each. All of them are one path."""
    path = " ".join(f"M{x.along(begin)},{y.up(at)} H{x.along(end)}" for begin, end, at in spans)
    return f'<path class="{kind}" style="stroke-width:{pixels:.1f}px" d="{path}"/>'


def mark(kind: str, x: Axis, value: float) -> str:
    """A vertical line at a value."""
    return f'<path class="{kind}" d="M{x.along(value)},0 V{_SIDE}"/>'


def number(value: float) -> str:
    """As short as it can be said."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"


def as_html(chart: Chart) -> str:
    """The chart as a ``figure``."""
    title, legend = (
        html.escape(chart.title),
        "".join(f'<li><i class="{k}"></i>{html.escape(t)}</li>' for k, t in chart.legend),
    )
    words = html.escape(f"{chart.title}: {', '.join(text for _, text in chart.legend)}", quote=True)
    grid = "".join(f'<path class="grid" d="M0,{chart.y.up(tick)} H{_SIDE}"/>' for tick in chart.y.ticks)
    across = "".join(_tick(f"left:{float(chart.x.along(tick)) / 10:.2f}%", tick) for tick in chart.x.ticks)
    up = "".join(_tick(f"top:{float(chart.y.up(tick)) / 10:.2f}%", tick) for tick in chart.y.ticks)
    return f"""<figure class="card">
<figcaption><h2>{title}</h2><ul class="legend">{legend}</ul></figcaption>
<p class="unit">{html.escape(chart.y.unit)}</p>
<div class="plot"><div class="up">{up}</div>
<svg viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" style="height:{chart.pixels}px" role="img" aria-label="{words}">
{grid}{"".join(chart.marks)}
</svg>
<div class="across">{across}</div></div>
<p class="unit end">{html.escape(chart.x.unit)}</p>
</figure>
"""


def _tick(place: str, value: float) -> str:
    return f'<span style="{place}">{number(value)}</span>'


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
    time = axis(report.seconds, "seconds")
    tokens = axis(max(slices.tokens_per_s), "output tokens/s", round_up=True)
    running = axis(max(slices.running), "requests running", whole=True, round_up=True)
    return [
        *_spread("Time to first token", ttft, report.ttft_ms),
        *_spread("Time between tokens", gaps, report.itl_ms),
        Chart(
            title="Throughput",
            x=time,
            y=tokens,
            marks=[steps("a area", time, tokens, slices.width, slices.tokens_per_s)],
            legend=[("a", f"{report.output_tokens_per_s:,.1f} output tokens/s on average")],
        ),
        Chart(
            title="Concurrency",
            x=time,
            y=running,
            marks=[steps("b area", time, running, slices.width, slices.running)],
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
    x = axis(min(numbers.max, 2 * numbers.p99), "ms", ticks=6)
    y = axis(100, "% of all, up to", round_up=True)
    points = [(ordered[0], 0.0), *((percentile(ordered, share), float(share)) for share in _SHARES)]
    shown = [(value, share) for value, share in points if value <= x.end]
    shown.append((x.end, 100 * bisect.bisect_right(ordered, x.end) / len(ordered)))
    marks = [mark(name, x, getattr(numbers, name)) for name in ("p50", "p90", "p99")]
    return [
        Chart(
            title=title,
            x=x,
            y=y,
            marks=[*marks, line("a", x, y, shown)],
            legend=[(name, f"{name} {getattr(numbers, name):,.1f} ms") for name in ("p50", "p90", "p99")]
            + [("", f"max {numbers.max:,.1f} ms")],
        )
    ]


def _timeline(records: Sequence[Record], seconds: float) -> Chart:
    """Every request from when it was sent to its end, oldest at the top."""
    every = -(-len(records) // _DRAWN) or 1
    drawn = [(number, record) for number, record in enumerate(records, start=1)][::every]
    x, y = axis(seconds, "seconds"), axis(len(records), "requests ended", whole=True)
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
        y=Axis(y.end, [], "oldest first"),
        marks=[
            bars(kind, x, y, spans, pixels=thick)
            for kind, spans in (("b", waits), ("a", streams), ("bad", bad))
            if spans
        ],
        legend=legend,
        pixels=pixels,
    )


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and when."""

    options: BenchOptions
    model: str
    engines: str
    """How many, in words."""
    about: str
    """What was asked, in words."""
    began: datetime
    version: str
    """Of Penstock, on the client's side."""


def html_report(run: Run, report: Report, records: Sequence[Record]) -> str:
    """The page."""
    style = importlib.resources.files("penstock_local").joinpath("bench/report.css").read_text(encoding="utf-8")
    charts = "".join(as_html(chart) for chart in report_charts(records, report))
    head = f"{run.model}, {run.options.load}"
    when = f"{run.began.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{html.escape(head)} · penstock bench</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{html.escape(run.model)}</h1><p>{html.escape(run.options.load)} · {html.escape(run.about)} · {when}</p></header>
<main>
{_figures(report)}
<section class="card"><h2>Latencies in milliseconds</h2>{_latencies(report)}</section>
<section class="card"><h2>Throughput</h2>{_pairs(summary_rows(report))}{_failures(report)}</section>
{charts}<section class="card wide"><h2>Settings</h2>{_pairs(_settings(run))}
<pre>{html.escape(_command(run.options))}</pre></section>
</main>
</body>
</html>
"""


def _figures(report: Report) -> str:
    """The few numbers that are looked at first."""
    figures = [
        ("output tokens/s", f"{report.output_tokens_per_s:,.1f}"),
        ("requests/s", f"{report.requests_per_s:,.2f}"),
        *((f"{name}, p50", f"{value.p50:,.1f} ms") for name, value in _medians(report) if value is not None),
    ]
    tiles = "".join(f"<div><b>{value}</b><span>{name}</span></div>" for name, value in figures)
    return f'<section class="card wide figures">{tiles}</section>'


def _medians(report: Report) -> Sequence[tuple[str, Latencies | None]]:
    return [("first token", report.ttft_ms), ("between tokens", report.itl_ms), ("whole request", report.e2e_ms)]


def _latencies(report: Report) -> str:
    rows = latency_rows(report)
    if not rows:
        return "<p>No request ended well.</p>"
    columns = "".join(f'<th scope="col">{name}</th>' for name in Latencies.__struct_fields__)
    lines = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{value}</td>" for value in values)}</tr>'
        for name, values in rows.items()
    )
    return f'<div class="scroll"><table><thead><tr><td></td>{columns}</tr></thead><tbody>{lines}</tbody></table></div>'


def _pairs(rows: Mapping[str, str]) -> str:
    return f"<dl>{''.join(f'<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>' for k, v in rows.items())}</dl>"


def _failures(report: Report) -> str:
    if not report.failures:
        return ""
    counts = ", ".join(f"{count} {code}" for code, count in report.failures.items())
    return f'<p class="failed">Failed: {html.escape(counts)}</p>'


def _settings(run: Run) -> Mapping[str, str]:
    options = run.options
    sampling = {"temperature": 0.0, **options.sampling}
    return {
        "server": f"{options.address}, {run.engines}",
        "load": options.load,
        "prompts": run.about,
        "warm-up": f"{options.warmup} requests before, not counted",
        "sampling": ", ".join(f"{name} {value}" for name, value in sampling.items()),
        "outputs": "may end before their length" if options.may_end else "run to their full length",
        "seed of prompts and times": f"{options.bench_seed}",
        "Penstock": run.version,
    }


def _command(options: BenchOptions) -> str:
    """The command that runs this load again, without the files that it wrote."""
    words = ["penstock", "bench"]
    given = {
        field.name: getattr(options, field.name)
        for field in msgspec.structs.fields(options)
        if field.name not in ("sampling", "json", "plot", "report")
        and (field.required or getattr(options, field.name) != field.default)
    }
    for name, value in (given | dict(options.sampling)).items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, f"{value}"]
    return shlex.join(words)
