"""A panel of the dashboard, and queries that several panels use."""

import msgspec

OF_RELEASE = 'namespace="$namespace",release="$release"'
OF_ENGINES = f'{OF_RELEASE},component="enginecore",pool=~"$pool"'
OF_POOLS = f'{OF_RELEASE},pool=~"$pool"'
"""Selector for metrics of the coordinator about pools."""
OVER = "[$__rate_interval]"


class Panel(msgspec.Struct, frozen=True):
    """A graph. ``queries``: PromQL by the name of its lines, in Grafana's ``{{label}}`` notation. ``unit``: one of Grafana's."""

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
    """Return a query for quantiles of a histogram of the release, by name."""
    buckets = f"sum by (le) (rate({histogram}_bucket{{{OF_RELEASE}}}{OVER}))"
    return {f"p{part * 100:.0f}": f"histogram_quantile({part}, {buckets})" for part in (0.5, 0.95, 0.99)}


def rate(counter: str, labels: str = OF_RELEASE, by: str = "") -> str:
    """Return a query for the rate of a counter, per second."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({counter}{{{labels}}}{OVER}))"


def share(part: str, whole: str, labels: str, by: str) -> str:
    """Return a query for the share of one counter in another."""
    return f"{rate(part, labels, by)} / {rate(whole, labels, by)}"


def of_pools(gauge: str, how: str = "avg") -> str:
    """A gauge of engines, by pool."""
    return f"{how} by (pool) ({gauge}{{{OF_ENGINES}}})"
