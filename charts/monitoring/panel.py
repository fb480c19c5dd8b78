"""Panels and rows of the dashboard, and parts of queries that panels share."""

import msgspec

OF_RELEASE = 'namespace="$namespace",release="$release"'
OF_ENGINES = f'{OF_RELEASE},component="enginecore",pool=~"$pool"'
OF_POOLS = f'{OF_RELEASE},pool=~"$pool"'
"""Labels that select the coordinator's metrics of pools."""
OVER = "[$__rate_interval]"


class Panel(msgspec.Struct, frozen=True):
    """A graph of the dashboard.

    Attributes:
        title: Title of the graph.
        unit: Unit of the values, by Grafana's name for it.
        description: Explanation shown to readers of the dashboard.
        queries: PromQL queries by legend, in Grafana's ``{{label}}`` notation.
        stacked: Whether the lines are stacked.
    """

    title: str
    unit: str
    description: str
    queries: dict[str, str]
    stacked: bool = False


class Row(msgspec.Struct, frozen=True):
    """Panels side by side under a title."""

    title: str
    panels: tuple[Panel, ...]


def quantiles(histogram: str) -> dict[str, str]:
    """Return queries for the 50th, 95th and 99th percentile of a histogram, by legend."""
    buckets = f"sum by (le) (rate({histogram}_bucket{{{OF_RELEASE}}}{OVER}))"
    return {f"p{part * 100:.0f}": f"histogram_quantile({part}, {buckets})" for part in (0.5, 0.95, 0.99)}


def rate(counter: str, labels: str = OF_RELEASE, by: str = "") -> str:
    """Return a query for the increase of a counter per second."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({counter}{{{labels}}}{OVER}))"


def share(part: str, whole: str, labels: str, by: str) -> str:
    """Return a query for the ratio of two counters' rates."""
    return f"{rate(part, labels, by)} / {rate(whole, labels, by)}"


def of_pools(gauge: str, how: str = "avg") -> str:
    """Return a query for a gauge of engines, aggregated by pool."""
    return f"{how} by (pool) ({gauge}{{{OF_ENGINES}}})"
