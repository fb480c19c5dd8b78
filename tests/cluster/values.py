"""Values that the tests install with: the chart's own profile for CPUs, with engines that cost next to nothing."""

from collections.abc import Mapping
from typing import Any

import yaml

from tests.cluster.images.sources import chart_version
from tests.cluster.release import CHART

MODEL = "penstock-tiny"
ORACLE_ENGINE = "penstock/oracle-engine"


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` over ``base``, as helm merges values."""
    both = dict(base)
    for key, value in changes.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def cpu_profile(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The profile that the README tells people to install first."""
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
