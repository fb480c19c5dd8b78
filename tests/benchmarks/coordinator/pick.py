"""Time that a frontend takes to choose one of many engines, from the list of connections to the router's choice."""

import statistics
import time

from penstock_common.security.tls import Certificates
from penstock_common.types.cluster import EngineState
from penstock_frontend.config import FrontendConfig, ModelConfig
from penstock_frontend.dispatch.pool import EnginePool
from penstock_frontend.dispatch.router import Router

ROUNDS = 200


class Connected:
    """Connection with only the fields that the engine pool reads."""

    ready = None

    def __init__(self, number: int) -> None:
        self.address = f"10.0.{number // 256}.{number % 256}:50052"
        self.rank = number
        self.state = EngineState.SERVING
        self.draining = False
        self.session = object()


def seconds_per_pick(engines: int) -> float:
    """Return the median time of a choice among ``engines`` engines, which all accept requests."""
    config = FrontendConfig(model=ModelConfig(path="model"), engines=("engine:50052",))
    pool = EnginePool(config, incarnation="1", certificates=Certificates(), on_first_request=lambda _: None)
    connections = [Connected(number) for number in range(engines)]
    pool._connections = {connection.address: connection for connection in connections}  # type: ignore[misc]
    router = Router()
    for connection in connections:
        router.report(
            connection.address, waiting=connection.rank % 7, running=connection.rank % 100, kv_cache_usage=0.6
        )
    times = []
    for number in range(ROUNDS):
        began = time.perf_counter()
        key = router.pick(pool.candidates())
        times.append(time.perf_counter() - began)
        router.sent(key, str(number))
    return statistics.median(times)
