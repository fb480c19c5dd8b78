"""Utility calls to all engines on behalf of an API."""

from typing import Any

from penstock_common.errors import RequestFailed, Unavailable
from penstock_frontend.dispatch.engine_errors import of_engine
from penstock_frontend.ports import EngineClient


async def ask_all(engines: EngineClient, method: str, *arguments: object) -> dict[str, Any]:
    """Results by engine id, in the order of the ids.

    Raises the first error, with its engine's name, after all have answered; Unavailable when no engine is connected.
    """
    results = await engines.call_utility(method, arguments)
    if not results:
        raise Unavailable("no engine is connected", retry_after=1.0)
    for engine, result in sorted(results.items()):
        if isinstance(result, RequestFailed):
            raise of_engine(engine, result)
    return dict(sorted(results.items()))
