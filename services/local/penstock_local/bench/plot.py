"""Charts of a benchmark. matplotlib is imported only when a chart is drawn, so other commands do not need it."""

import importlib.util
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock_common.errors import ConfigError
from penstock_local.bench.report import Latencies, Record, Report, cut

_BINS = 60
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#2f6fb3", "#d9822b", "#3a8f5c", "#c23b3b", "#8a8f98"
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
_LEGEND: Any = {"framealpha": 0.9, "edgecolor": "none", "fancybox": False}


_PAGE_COLORS = {
    _BLUE: "a",
    _ORANGE: "b",
    _GREEN: "b",
    _RED: "bad",
    "#000000": "text",
    "#e6e8eb": "line",
    "#ffffff": "card",
}
"""Map from colors to their names in the style of the HTML page, which replaces the colors in dark mode."""
_DRAWN = 400
"""Maximum number of requests in a chart of the page. If the run has more requests, an even selection is drawn."""


def check(file: str, *, flag: str) -> None:
    """Raise ConfigError if charts are requested but matplotlib is not installed."""
    if file and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{flag} needs matplotlib: pip install 'penstock[plot]'")


def draw(file: str, records: Sequence[Record], report: Report, *, title: str) -> None:
    """Draw throughput over time and the latency distributions into a file. The file name's suffix selects the format."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        figure.suptitle(
            f"{title}: {report.output_tokens_per_s:,.0f} output tokens/s, {report.requests_per_s:.2f} requests/s",
            fontsize=12,
        )
        for axes, panel in zip(figure.subplots(2, 2).flat, _panels(records, report), strict=True):
            panel(axes)
        figure.savefig(file, dpi=130)


def charts(records: Sequence[Record], report: Report) -> Iterator[str]:
    """Yield the panels of the chart as SVG. The page's style sets the colors."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({**_STYLE, "svg.fonttype": "none", "svg.hashsalt": "penstock"}):
        for panel in _panels(records, report, every=-(-len(records) // _DRAWN) or 1):
            figure, file = Figure(figsize=(5.6, 3.1), layout="constrained"), io.StringIO()
            axes = figure.subplots()
            panel(axes)
            for patch in (figure.patch, axes.patch):
                patch.set_visible(False)
            figure.savefig(file, format="svg", metadata=nothing)
            svg = file.getvalue()
            svg = re.sub(r'<metadata>.*?</metadata>|(?<=<g) id="\w+"', "", svg[svg.index("<svg") :], flags=re.DOTALL)
            svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"fill: #000000; font-size: \1", svg)
            yield re.sub("|".join(_PAGE_COLORS), lambda found: f"var(--{_PAGE_COLORS[found[0]]})", svg)


def _panels(records: Sequence[Record], report: Report, *, every: int = 1) -> Sequence[Callable[[Any], None]]:
    """Return a function for each panel, which draws it on axes. The last panel shows one of ``every`` requests."""
    good = [record for record in records if record.ok]
    ttft = [record.ttft for record in good if record.ttft is not None]
    gaps = [gap for record in good for gap in record.gaps()]
    return [
        lambda axes: _throughput(axes, records, report.seconds),
        lambda axes: _spread(axes, "Time to first token", ttft, report.ttft_ms, _BLUE),
        lambda axes: _spread(axes, "Time between tokens", gaps, report.itl_ms, _GREEN),
        lambda axes: _requests(axes, records[::every], "Requests" if every == 1 else f"Requests, one of {every}"),
    ]


def _throughput(axes: Any, records: Sequence[Record], seconds: float) -> None:
    """Draw tokens per second in slices of the run, and the number of running requests at the middle of each slice."""
    slices = cut(records, seconds, _BINS)
    axes.set_title("Throughput")
    axes.fill_between(slices.middles, slices.tokens_per_s, step="mid", color=_BLUE, alpha=0.25, linewidth=0)
    axes.step(slices.middles, slices.tokens_per_s, where="mid", color=_BLUE)
    axes.set(xlabel="seconds", ylabel="output tokens/s", xlim=(0, seconds))
    axes.set_ylim(bottom=0)
    axes.yaxis.label.set_color(_BLUE)
    right = axes.twinx()
    right.step(slices.middles, slices.running, where="mid", color=_ORANGE, linewidth=1)
    right.set_ylabel("requests running", color=_ORANGE)
    right.set_ylim(0, max(slices.running) * 1.15 + 1)
    right.grid(visible=False)


def _spread(axes: Any, title: str, seconds: Sequence[float], numbers: Latencies | None, color: str) -> None:
    """Draw a histogram with its percentiles."""
    axes.set_title(title)
    axes.set(xlabel="ms", ylabel="share")
    if numbers is None:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color=_GREY)
        return
    values = [value * 1e3 for value in seconds]
    # The last bar counts all slow values. If the axis extended to the slowest value, most values would be in one bar.
    end = max(min(numbers.max, 2 * numbers.p99), 1e-6)
    shares = [1 / len(values)] * len(values)
    axes.hist([min(value, end) for value in values], bins=_BINS, range=(0, end), weights=shares, color=color, alpha=0.7)
    for name, style in (("p50", "-"), ("p90", "--"), ("p99", ":")):
        value = getattr(numbers, name)
        axes.axvline(value, color="black", linestyle=style, linewidth=1, label=f"{name} {value:,.1f} ms")
    axes.set_xlim(0, end)
    axes.legend(loc="upper right", **_LEGEND)


def _requests(axes: Any, records: Sequence[Record], title: str) -> None:
    """Draw every request at its send time: the time to its first token and to its end."""
    good, bad = [r for r in records if r.ok], [r for r in records if not r.ok]
    series = (
        ("end", [(r.start, r.latency) for r in good], _BLUE),
        ("first token", [(r.start, r.ttft) for r in good if r.ttft is not None], _GREEN),
        ("failure", [(r.start, r.latency) for r in bad], _RED),
    )
    axes.set_title(title)
    axes.set(xlabel="sent at, seconds", ylabel="seconds until")
    for name, points, color in series:
        if points:
            axes.scatter(*zip(*points, strict=True), s=10, color=color, alpha=0.7, linewidth=0, label=name)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    if records:
        axes.legend(loc="upper right", **_LEGEND)
