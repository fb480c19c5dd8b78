"""Transport between workers of one host, and its log line."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock_enginecore.config import EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.executor.worker import Worker
from penstock_enginecore.worker.messages import WorkerConfig


@pytest.mark.parametrize(("collectives", "warnings"), [("auto", 1), ("gloo", 0)])
def test_sockets_that_nobody_asked_for_are_told_once(
    collectives: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    executor = ExecutorConfig(tensor_parallel_size=2, collectives=collectives)  # type: ignore[arg-type]
    engine = EngineCoreConfig(model=ModelConfig(path="m", device="cpu"), executor=executor)
    store = os.memfd_create("test")
    try:
        with caplog.at_level(logging.WARNING), ThreadPoolExecutor(2) as pool:
            configs = [WorkerConfig(engine=engine, rank=rank, world_size=2, store=store) for rank in range(2)]
            for worker in list(pool.map(Worker, configs)):
                worker.shutdown()
    finally:
        os.close(store)
    told = [record for record in caplog.records if "over sockets" in record.getMessage()]
    assert len(told) == warnings
