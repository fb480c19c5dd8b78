"""``penstock scale``: how many engines a pool has, where that is the operators' to say."""

import sys
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_flags
from penstock_common.errors import PenstockError
from penstock_local.console import fail, say
from penstock_local.failures import of_operators_api
from penstock_local.rpc.admin import AdminClient

EXIT_FAILED = 1
_TIMEOUT = 30.0
"""Seconds: a frontend waits shorter for its coordinator, and says what failed."""


class ScaleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``penstock scale``."""

    admin_address: str
    """Operators' API of any frontend of the cluster, host:port."""
    pool: Annotated[str, Meta(min_length=1)]
    replicas: int
    """Engines that the pool is to have; whether it may the coordinator says."""

    def __post_init__(self) -> None:
        check_flags(self)


async def scale(options: ScaleOptions) -> int:
    """Change the number of engines. Returns the exit code."""
    async with AdminClient(options.admin_address) as admin:
        try:
            previous = await admin.scale(options.pool, options.replicas, deadline=_TIMEOUT)
        except PenstockError as e:
            fail(of_operators_api(e))
            return EXIT_FAILED
    sys.stdout.write(f"pool {options.pool}: {_engines(previous)} wanted before, {options.replicas} now\n")
    if not options.replicas:
        say(f"requests wake nobody: `penstock scale --pool {options.pool} 1` brings an engine back")
    return 0


def _engines(count: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'}"
