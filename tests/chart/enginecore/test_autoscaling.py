"""enginecore/_autoscaling.tpl: enabling autoscaling keeps the number of engines, for any tool that installed them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from charts import lint
from tests.chart.rendering import HUB, VALUE_SETS

PROBE = """
apiVersion: v1
kind: ConfigMap
metadata: {name: probe}
data:
  keeps: "{{ include "penstock.keepsReplicas" (dict "live" (fromJson .Values.live)) }}"
"""


def deployment(*managers: dict[str, Any], **annotations: str) -> dict[str, Any]:
    metadata = {"annotations": annotations, "managedFields": list(managers)} if annotations or managers else {}
    return {"metadata": metadata, "spec": {"replicas": 3}}


def manager(name: str, operation: str, *fields: str, **more: str) -> dict[str, Any]:
    return {
        "manager": name,
        "operation": operation,
        "fieldsV1": {"f:spec": {f"f:{field}": {} for field in fields}},
        **more,
    }


BY_SCALE = manager("kube-controller-manager", "Update", "replicas", subresource="scale")


@pytest.mark.parametrize(
    ("live", "keeps"),
    [
        ({}, ""),
        (deployment(), "true"),
        (deployment(manager("helm", "Update", "replicas", "template")), "true"),
        (deployment(manager("helm", "Update", "template"), BY_SCALE), "true"),
        (
            deployment(manager("helm", "Update", "template"), BY_SCALE, **{"penstock.io/replicas": "autoscaler"}),
            "false",
        ),
        (deployment(manager("helm", "Apply", "replicas", "template")), "true"),
        (deployment(manager("helm", "Apply", "template"), BY_SCALE), "false"),
    ],
    ids=[
        "there is none",
        "without managed fields",
        "helm 3 made it with a number",
        "helm 3 made it with a number, an autoscaler changed it",
        "helm 3 made it without a number",
        "helm 4 owns the number",
        "helm 4 has lost the number to an autoscaler",
    ],
)
def test_a_number_that_would_be_lost_is_kept(live: dict[str, Any], keeps: str, tmp_path: Path):
    chart = tmp_path / "penstock"
    shutil.copytree(lint.CHART, chart)
    (chart / "values.schema.json").unlink()
    (chart / "templates" / "probe.yaml").write_text(PROBE, encoding="utf-8")
    values = tmp_path / "live.yaml"
    values.write_text(json.dumps({"live": json.dumps(live)}), encoding="utf-8")
    [probe] = [m for m in lint.render(VALUE_SETS[HUB], values, chart=chart) if m["metadata"]["name"] == "probe"]
    assert probe["data"]["keeps"] == keeps
