"""Engines that hand keys and values over to each other, with a frontend that sends prompts to one and outputs to another."""

from pathlib import Path
from typing import Any

from tests.fakes.systems.cluster import Cluster


def transferring(model: Path, engines: int, transport: str, *roles: str, **flags: Any) -> Cluster:
    """The cluster, not started. ``roles``: of the engines, where they have one."""
    cluster = Cluster(
        model,
        engines=engines,
        frontend_flags={"disaggregation__min_prefill_tokens": 32, "disaggregation__overflow": "false"},
        kv_transfer__transport=transport,
        kv_transfer__port=0,
        **flags,
    )
    for engine, role in zip(cluster.engines, roles, strict=False):
        engine.add_flag("role", role)
    return cluster
