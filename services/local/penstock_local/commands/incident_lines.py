"""Lines of ``penstock status`` about what went wrong lately: engines that were lost, and tenants that are refused."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.text import Text

from penstock_local.rpc.admin import Cluster, LostEngine

_SHOWN = 10
"""Lines of each kind; ``--json`` has all."""
_OTHER = "other"
"""What frontends call all tenants that they do not show apart; no tenant is called so."""


def incident_lines(clusters: Sequence[Cluster]) -> list[Text]:
    """``clusters``: the cluster as each frontend sees it, the first one's losses count. Moved and refused requests are summed."""
    return [*_lost(clusters), *_refused(clusters)]


def shown_losses(cluster: Cluster) -> Sequence[LostEngine]:
    """Return the losses that have a line."""
    return cluster.lost_engines[:_SHOWN]


def _lost(clusters: Sequence[Cluster]) -> Iterable[Text]:
    present = {engine.engine_id for engine in clusters[0].engines if engine.state.name != "DEAD"}
    for lost in shown_losses(clusters[0]):
        # Frontends notice a loss at different times, within seconds.
        also = [
            other
            for cluster in clusters[1:]
            for other in cluster.lost_engines
            if other.address == lost.address and abs(other.seconds_ago - lost.seconds_ago) < 5.0
        ]
        moved = lost.num_moved + sum(other.num_moved for other in also)
        back = ", is back" if lost.engine_id in present else ""
        text = f"{lost.engine_id} lost {_ago(lost.seconds_ago)} ago, {moved} request{'' if moved == 1 else 's'} moved{back}"
        yield Text(f"{text}: {lost.reason}", style="yellow" if back else "red")


def _refused(clusters: Sequence[Cluster]) -> Iterable[Text]:
    counts: Counter[tuple[str, str]] = Counter()
    for cluster in clusters:
        for each in cluster.tenant_refusals:
            counts[each.tenant, each.reason] += each.num_refused
    for (tenant, reason), count in counts.most_common(_SHOWN):
        whose = "other tenants" if tenant == _OTHER else f"tenant {tenant}" if tenant else "requests without a tenant"
        yield Text(f"{whose}: {count} refused in the last minute: {reason}", style="yellow")


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
