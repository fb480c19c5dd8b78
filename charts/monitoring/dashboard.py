"""Generator of the chart's Grafana dashboard: ``python -m charts.monitoring.dashboard`` (``make dashboard``)."""

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.builders import prometheus, timeseries
from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

from charts.monitoring.panel import Panel
from charts.monitoring.panels import ROWS

FILE = Path(__file__).resolve().parents[1] / "penstock" / "monitoring" / "dashboard.json"
_WIDTH = 24
_HEIGHT = 8
_PER_LINE = 4
_SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")


def text() -> str:
    """Return the dashboard as JSON."""
    built = (
        board.Dashboard("Penstock").uid("penstock").tags(["penstock"]).editable().refresh("30s").time("now-3h", "now")
    )
    built = built.tooltip(dashboard.DashboardCursorSync.CROSSHAIR).timezone("browser")
    for variable in _variables():
        built = built.with_variable(variable)
    number = 0
    for row in ROWS:
        number += 1
        built = built.with_row(board.Row(row.title).id(number))
        # Use as few rows of panels as possible, with panels of equal width.
        across = len(row.panels) if len(row.panels) <= _PER_LINE else _PER_LINE - 1
        for panel in row.panels:
            number += 1
            built = built.with_panel(_graph(panel).id(number).span(_WIDTH // across))
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(built.build())), indent=1, sort_keys=True) + "\n"


def _variables() -> list[board.DatasourceVariable | board.QueryVariable]:
    return [
        board.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
        _labels("namespace", "label_values(penstock:build_info, namespace)"),
        _labels("release", 'label_values(penstock:build_info{namespace="$namespace"}, release)'),
        _labels("pool", 'label_values(penstock:load{namespace="$namespace",release="$release"}, pool)')
        .multi(True)
        .include_all(True)
        .all_value(".*"),
    ]


def _labels(name: str, query: str) -> board.QueryVariable:
    return (
        board.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query({"query": query, "refId": name})
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )


def _graph(panel: Panel) -> timeseries.Panel:
    graph = timeseries.Panel().title(panel.title).description(panel.description).unit(panel.unit).min(0)
    graph = graph.datasource(_SOURCE).height(_HEIGHT).fill_opacity(30 if panel.stacked else 0).line_width(1)
    graph = graph.show_points(common.VisibilityMode.NEVER)
    graph = graph.tooltip(VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
    graph = graph.legend(
        VizLegendOptions()
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    if panel.stacked:
        graph = graph.stacking(StackingConfig().mode(common.StackingMode.NORMAL))
    for number, (legend, query) in enumerate(panel.queries.items()):
        target = prometheus.Dataquery().expr(query).legend_format(legend).range().ref_id(chr(ord("A") + number))
        graph = graph.with_target(target.datasource(_SOURCE))
    return graph


def main() -> None:
    """Write the file if it is out of date."""
    built = text()
    if not FILE.exists() or FILE.read_text(encoding="utf-8") != built:
        FILE.write_text(built, encoding="utf-8")
        print(f"wrote {FILE.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
