"""Implementation of ``penstock scale``, which sets the number of engines of a pool without an autoscaler."""

import asyncio
import sys
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_flags
from penstock_common.errors import PenstockError
from penstock_common.types.cluster import EngineState
from penstock_local.console import fail, say
from penstock_local.rpc.admin import AdminClient
from penstock_local.rpc.client import of_operators_api

EXIT_FAILED = 1
_POLL_SECONDS = 0.1
_TIMEOUT = 30.0
"""Timeout in seconds. The frontend's own timeout for its coordinator is shorter, so that the frontend can report the
timeout of its coordinator.
"""


class ScaleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of ``penstock scale``."""

    admin_address: str
    """Address of the admin API of any frontend of the cluster, as host:port."""
    pool: Annotated[str, Meta(min_length=1)]
    replicas: int
    """Target number of engines. The coordinator checks whether this number is allowed."""
    wait: bool = False
    """Whether to wait until the pool or the data-parallel group has that size."""

    def __post_init__(self) -> None:
        check_flags(self)


async def scale(options: ScaleOptions) -> int:
    """Change the number of engines. Returns the exit code."""
    async with AdminClient(options.admin_address) as admin:
        try:
            previous = await admin.scale(options.pool, options.replicas, deadline=_TIMEOUT)
            if options.wait:
                await _until_scaled(admin, options)
        except PenstockError as e:
            fail(of_operators_api(e))
            return EXIT_FAILED
    sys.stdout.write(f"pool {options.pool}: {_engines(previous)} wanted before, {options.replicas} now\n")
    if not options.replicas:
        say(f"new requests do not start an engine: `penstock scale --pool {options.pool} 1` starts one again")
    return 0


async def _until_scaled(admin: AdminClient, options: ScaleOptions) -> None:
    """Return when the pool has the target number of ranks, or of engines that accept requests."""
    while True:
        cluster = await admin.cluster(deadline=_TIMEOUT)
        group = next((group for group in cluster.groups if group.pool == options.pool), None)
        if group is not None:
            if len(group.view.group.members) == options.replicas and not group.suspended:
                return
        else:
            engines = [engine for engine in cluster.engines if engine.pool == options.pool]
            if len(engines) == options.replicas and all(e.state is EngineState.SERVING for e in engines):
                return
        await asyncio.sleep(_POLL_SECONDS)


def _engines(count: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'}"
