"""Real engine server in the test's process, which sends and receives KV blocks."""

from contextlib import ExitStack
from typing import Any

from penstock_common.security.tls import Certificates
from penstock_enginecore.app import build_engine, describe, media_inputs
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.executor.factory import make_executor
from penstock_enginecore.kv_transfer.assembly import transferring
from penstock_enginecore.structured_output.factory import make_grammar_backend
from tests.fakes.engines.engine_server import EngineServer


class TransferringServer(EngineServer):
    """Engine server whose ``load`` also starts the listener for other engines, if the config enables it."""

    def __init__(self, config: EngineCoreConfig) -> None:
        super().__init__(config, make_executor(config), make_grammar_backend)
        self._ends = ExitStack()

    def load(self) -> "TransferringServer":
        self.engine = build_engine(
            self.config, self.executor, self.make_grammars, lambda line: None, media_inputs(self.io)
        )
        self.engine.warm_up()
        ready = self._ends.enter_context(
            transferring(
                self.config,
                self.engine,
                describe(self.config, self.engine),
                certificates=Certificates(),
                registry=self.io.registry,
            )
        )
        self.control = EngineControl(self.engine)
        self.busy_loop = BusyLoop(self.engine, self.control, self.io.sessions)
        self.start_loop()
        self.io.attach(self.busy_loop, ready)
        return self

    def stop(self) -> None:
        super().stop()
        self._ends.close()

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all series of a metric that have these labels."""
        samples: list[Any] = [sample for family in self.io.registry.collect() for sample in family.samples]
        found: float = sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())
        return found
