"""Engines that transfer KV blocks to each other, with a frontend that uses separate engines for prefill and decode."""

from pathlib import Path
from typing import Any

from tests.fakes.systems.cluster import Cluster


def transferring(model: Path, engines: int, transport: str, *roles: str, **flags: Any) -> Cluster:
    """Return the cluster, which is not started yet. ``roles``: roles of the engines, if any."""
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
