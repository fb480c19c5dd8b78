"""Real engine that sends and receives KV blocks, run by a test's own thread."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from penstock_common.security.tls import Certificates
from penstock_common.types.outputs import EngineCoreOutput
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore import app
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.kv_transfer.assembly import transferring
from tests.fakes.engines.in_process import CLIENT, build_engine
from tests.fakes.patience import PATIENCE


class TransferringEngine:
    """Engine process with the checkpoint at ``path``. It ends when ``ends`` is set."""

    def __init__(self, path: Path, name: str, ends: ExitStack, **sections: Any) -> None:
        transfer = {"transport": "grpc", "port": 0, "advertise": "127.0.0.1", **sections.pop("kv_transfer", {})}
        sections = {"cache": {"block_size": 4, "num_blocks": 200, "min_load_tokens": 1}, **sections}
        self.core: EngineCore = build_engine(path, engine_id=name, kv_transfer=transfer, **sections)
        ends.callback(self.core.shutdown)
        self.registry = CollectorRegistry()
        self.ready = ends.enter_context(
            transferring(
                self.core.config,
                self.core,
                app.describe(self.core.config, self.core),
                certificates=Certificates(),
                registry=self.registry,
            )
        )
        self.first_output = 0.0
        """Time of the first output of the last run, in monotonic seconds."""

    def run(self, *requests: EngineCoreRequest) -> dict[str, list[EngineCoreOutput]]:
        """Run requests to their ends. Returns their outputs, by id."""
        for request in requests:
            self.core.add(self.core.preprocess(CLIENT, request))
        found: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
        self.first_output = 0.0
        while self.core.has_requests:
            self.core.leases.expire()
            for frame in self.core.step(lambda: None).values():
                for output in frame.outputs:
                    assert output.error is None, output.error
                    self.first_output = self.first_output or time.monotonic()
                    found[output.request_id].append(output)
            if self.core.stalled and self.core.has_requests:
                assert self.core.queues.get(block=True, timeout=PATIENCE), "nothing to do, and nothing comes"
        return found

    @property
    def num_free_blocks(self) -> int:
        """Return the number of free blocks of the pool."""
        return self.core.scheduler.kv_cache.pool.num_free_blocks

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all series of a metric that have these labels."""
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
