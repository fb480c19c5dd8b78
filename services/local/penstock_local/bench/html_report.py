"""HTML report of a benchmark: a single file without scripts or external resources."""

import html
import importlib.resources
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from penstock_local.bench.options import BenchOptions
from penstock_local.bench.plot import charts
from penstock_local.bench.report import Latencies, Record, Report, latency_rows, summary_rows


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a benchmark run."""

    options: BenchOptions
    model: str
    engines: str
    """Number of engines, in words."""
    about: str
    """Description of the prompts, in words."""
    began: datetime
    version: str
    """Penstock version of the client."""


def html_report(run: Run, report: Report, records: Sequence[Record]) -> str:
    """Return the HTML page."""
    style = importlib.resources.files("penstock_local").joinpath("bench/report.css").read_text(encoding="utf-8")
    pictures = "".join(f'<figure class="card">{svg}</figure>\n' for svg in charts(records, report))
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
{pictures}<section class="card wide"><h2>Settings</h2>{_pairs(_settings(run))}
<pre>{html.escape(_command(run.options))}</pre></section>
</main>
</body>
</html>
"""


def _figures(report: Report) -> str:
    """Return the tiles with the most important numbers."""
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
        return "<p>No request succeeded.</p>"
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
        "warm-up": f"{options.warmup} requests, not counted",
        "sampling": ", ".join(f"{name} {value}" for name, value in sampling.items()),
        "outputs": "may end early" if options.may_end else "run to their full length",
        "seed of prompts and times": f"{options.bench_seed}",
        "Penstock": run.version,
    }


def _command(options: BenchOptions) -> str:
    """Return the command that runs this load again, without its output files."""
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
