"""Unit tests of the rules with promtool: the alerts that fire for given series, and their times."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring import queries
from tests.monitoring.prometheus import program

SERIES = Path(__file__).parent / "series"
VALUES: dict[str, dict[str, Any]] = {
    "zero.yaml": {"enginecore": {"autoscaling": {"mode": "keda", "minReplicas": 0}}},
}
"""Values of the release for a file of series, if they differ from the chart's defaults."""


def rules_in(folder: Path, values: Mapping[str, Any] | None = None) -> Path:
    """Write the rules of a release into the file that promtool's tests name."""
    groups = [{"name": name, "rules": found} for name, found in queries.rules(values).items()]
    file = folder / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")
    return file


def promtool(*arguments: object) -> str:
    """Run promtool and return its output. The test fails if promtool reports an error."""
    command = [str(program("promtool")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("values", [None, *VALUES.values()])
def test_prometheus_takes_the_rules(values: dict[str, Any] | None, tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", rules_in(tmp_path, values))


@pytest.mark.parametrize("name", sorted(path.name for path in SERIES.glob("*.yaml")))
def test_alerts_fire_on_series(name: str, tmp_path: Path) -> None:
    rules_in(tmp_path, VALUES.get(name))
    copy = tmp_path / name
    copy.write_text((SERIES / name).read_text(encoding="utf-8"), encoding="utf-8")
    promtool("test", "rules", copy)


def test_every_alert_has_series() -> None:
    tested = set(re.findall(r'alertname="(\w+)"', (SERIES / "faults.yaml").read_text(encoding="utf-8")))
    assert tested == {name for name in queries.of_rules() if ":" not in name}
