"""An engine and a frontend as separate processes, for the duration of a benchmark."""

from tests.benchmarks.engine_targets import KV_CACHE_MEMORY
from tests.fakes.processes import Service


def engine(model: str, threads: int) -> Service:
    """Return an engine process with a session port."""
    return Service(
        "penstock_enginecore",
        model__path=model,
        cache__kv_cache_memory=KV_CACHE_MEMORY,
        executor__num_threads=threads,
    )


def frontend(model: str, engine_address: str) -> Service:
    """Return a frontend that sends its requests to the engine at ``engine_address``."""
    return Service(
        "penstock_frontend",
        model__path=model,
        engines=f"[{engine_address!r}]",
        admin__port=0,
        http__port=-1,
        server__max_connection_age=0,
    )
