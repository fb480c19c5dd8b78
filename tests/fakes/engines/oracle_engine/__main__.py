"""Oracle engine as a process: ``python -m tests.fakes.engines.oracle_engine --server.port 50052``.

``--knobs`` and ``control.py`` set its behavior. SIGTERM drains it like a real engine. Each start is a new incarnation.
"""

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Sequence

import msgspec

from penstock_common.addresses import split, with_default_port
from penstock_common.rpc import stats
from penstock_common.types.cluster import EngineRegistration
from penstock_enginecore.config import CoordinatorClientConfig
from penstock_enginecore.rpc.coordinator_client import CoordinatorClient
from tests.fakes.engines.oracle_engine import control
from tests.fakes.engines.oracle_engine.engine import OracleEngine


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags. Flags with a dot have the same names as those of a real engine."""
    parser = argparse.ArgumentParser(prog="oracle_engine", description=__doc__)
    parser.add_argument("--server.host", dest="host", choices=["127.0.0.1"], default="127.0.0.1")
    parser.add_argument("--server.port", dest="port", type=int, default=0)
    parser.add_argument("--engine-id", default="oracle-0")
    parser.add_argument("--model", default="model", help="name of the model")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--drain-timeout", type=float, default=30.0)
    parser.add_argument("--coordinator.address", dest="coordinator", default="")
    parser.add_argument("--coordinator.advertise", dest="advertise", default="")
    parser.add_argument("--control-port", type=int, default=0, help="where control.py calls; 0: nowhere")
    parser.add_argument("--receiver-cache-bytes", type=int, default=-1, help="kept of media; below 0: none are taken")
    parser.add_argument("--knobs", default="{}", help="knobs.Knobs as JSON")
    parser.add_argument("--log.level", dest="log_level", help="taken, as every service does; there is no log")
    return parser.parse_args(arguments)


async def main(flags: argparse.Namespace) -> None:
    """Serve until SIGTERM and the end of the drain, or until the engine is dead."""
    engine = OracleEngine(
        flags.engine_id,
        model=flags.model,
        incarnation=f"{os.getpid()}-{time.time_ns()}",
        max_model_len=flags.max_model_len,
        drain_timeout=flags.drain_timeout,
    )
    if flags.receiver_cache_bytes >= 0:
        engine.serve_media(flags.receiver_cache_bytes, shared_memory=True)
    engine.set(**msgspec.json.decode(flags.knobs))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, engine.request_drain)
    loop.add_signal_handler(signal.SIGINT, engine.request_drain)
    controlled = await control.serve(engine, flags.control_port) if flags.control_port else None
    await engine.start(flags.port)
    client = _coordinator_client(engine, flags) if flags.coordinator else None
    registered = asyncio.create_task(client.run()) if client is not None else None
    await engine.run()
    if client is not None and registered is not None:
        await client.close()
        await registered
    if controlled is not None:
        controlled.close()
    await engine.kill(grace=control.TIMEOUT / 10)


def _coordinator_client(engine: OracleEngine, flags: argparse.Namespace) -> CoordinatorClient:
    registration = EngineRegistration(
        engine_id=engine.ready.engine_id,
        incarnation=engine.ready.incarnation,
        address=with_default_port(flags.advertise, split(engine.address)[1]) if flags.advertise else engine.address,
        model=engine.ready.model,
    )
    client = CoordinatorClient(
        CoordinatorClientConfig(address=flags.coordinator, stats_interval=0.05, reconnect_max=0.5),
        registration=lambda: registration,
        stats=lambda: stats.from_proto(engine.stats()),
        on_command=lambda _: engine.request_drain(),
    )
    engine.on_draining = client.draining
    return client


if __name__ == "__main__":
    asyncio.run(main(parse()))
