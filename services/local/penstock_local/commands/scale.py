"""``penstock scale``: how many engines a pool has, where that is the operators' to say."""

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
"""Seconds: a frontend waits shorter for its coordinator, and says what failed."""


class ScaleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``penstock scale``."""

    admin_address: str
    """Operators' API of any frontend of the cluster, host:port."""
    pool: Annotated[str, Meta(min_length=1)]
    replicas: int
    """Engines that the pool is to have; whether it may the coordinator says."""
    wait: bool = False
    """Return when a data-parallel group has that many ranks."""

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
        say(f"requests wake nobody: `penstock scale --pool {options.pool} 1` brings an engine back")
    return 0


async def _until_scaled(admin: AdminClient, options: ScaleOptions) -> None:
    """Return when the pool has as many ranks, or engines that take requests, as were asked for."""
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
