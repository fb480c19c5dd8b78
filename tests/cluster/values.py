"""Chart values of the tests: the chart's CPU profile, with oracle engines that use few resources."""

from collections.abc import Mapping
from typing import Any

import yaml

from tests.cluster.images.sources import chart_version
from tests.cluster.release import CHART

MODEL = "penstock-tiny"
ORACLE_ENGINE = "penstock/oracle-engine"


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` merged with ``changes``, by helm's rules for values."""
    both = dict(base)
    for key, value in changes.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def cpu_profile(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the values of the CPU profile, which the README installs first."""
    profile = yaml.safe_load((CHART / "profiles" / "cpu-demo-values.yaml").read_text())
    return merged(profile, changes or {})


def oracle(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return values with two frontends and two engines that need no torch. Equal prompts give equal tokens."""
    small = {"requests": {"cpu": "50m", "memory": "128Mi"}}
    own = {
        "frontend": {"replicas": 2, "resources": small},
        "coordinator": {"resources": small},
        "enginecore": {
            "replicas": 2,
            "image": {"repository": ORACLE_ENGINE, "tag": chart_version()},
            "resources": small,
            "modelCache": {"sizeLimit": "64Mi"},
        },
    }
    return merged(merged(cpu_profile(), own), changes or {})
