"""PromQL queries of the chart's rules, of the dashboard and of the pages, with their metrics and labels."""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import yaml

from charts import lint

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE, RELEASE = "serving", "demo"
"""Namespace and release for which ``charts.lint.render`` renders."""
VARIABLES = {"$namespace": NAMESPACE, "$release": RELEASE, "$pool": ".*", "$__rate_interval": "5m"}
TARGET_LABELS = frozenset({"namespace", "pod", "release", "component", "pool"})
"""Labels that the PodMonitors add to every series."""


class Use(NamedTuple):
    """A metric, and the labels by which a query selects or groups it."""

    metric: str
    labels: frozenset[str]


def rules(release: Mapping[str, Any] | None = None, **values: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the rules of a release by group.

    Args:
        release: Values of the release.
        values: Values of ``metrics.prometheusRule``.
    """
    text = yaml.safe_dump({**(release or {}), "metrics": {"prometheusRule": {"enabled": True, **values}}})
    (manifest,) = [m for m in _rendered(text) if m["kind"] == "PrometheusRule"]
    return {group["name"]: group["rules"] for group in manifest["spec"]["groups"]}


def _rendered(values: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "values.yaml"
        file.write_text(values, encoding="utf-8")
        return lint.render(lint.CHART / "ci" / "hub-values.yaml", file)


def of_rules() -> dict[str, str]:
    """Return the queries of the rules, by the names of alerts and recordings."""
    return {rule.get("alert") or rule["record"]: rule["expr"] for group in rules().values() for rule in group}


def of_dashboard() -> dict[str, str]:
    """Return the queries of the dashboard by panel and line, with its variables filled in."""
    board = json.loads((lint.CHART / "monitoring" / "dashboard.json").read_text(encoding="utf-8"))
    found = {}
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            found[f"{panel['title']}: {target['legendFormat']}"] = query
    return found


def of_pages() -> dict[str, str]:
    """Return the queries in code blocks of docs/guides/observability.md, by page and number."""
    page = (ROOT / "docs/guides/observability.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    lines = [
        line.partition("#")[0].strip()
        for block in blocks
        if "histogram_quantile(" in block
        for line in block.splitlines()
    ]
    return {f"observability.md {number}": line for number, line in enumerate(lines) if re.match(r"[\w:]+[ (]", line)}


def uses(query: str) -> Iterator[Use]:
    """Yield the metrics of a query. Raises ValueError if the query is invalid."""
    found: list[Use] = []
    grouped: set[str] = set()

    def visit(node: object) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(Use(node.name or "", frozenset(matcher.name for matcher in node.matchers.matchers)))
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)
        return True

    promql_parser.walk(promql_parser.parse(query), visit)
    yield from found
    # A grouping does not name its metric, so at least one metric of the query must have the label.
    yield from (Use("", frozenset({label})) for label in grouped)
