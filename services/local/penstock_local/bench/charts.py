"""Charts as HTML with inline SVG. They need no library and no script, and stay readable at any width.

The drawing is stretched to the width there is; words stand around it as HTML, where they keep their size.
"""

import html
import math
from collections.abc import Iterable, Sequence

import msgspec

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
