"""Real engine server in the test's process: I/O thread, gRPC and busy loop. Only the executor may be a fake."""

import threading
import time
from collections.abc import Callable

import msgspec

from penstock_enginecore.app import build_engine, describe, media_inputs
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.executor import Executor
from penstock_enginecore.rpc.io_thread import IoThread
from penstock_enginecore.structured_output.core.base import GrammarBackendFactory
from tests.fakes.patience import PATIENCE


class EngineServer:
    """Engine server that listens after ``start`` and serves after ``load``. The busy loop runs in a separate thread."""

    def __init__(
        self, config: EngineCoreConfig, executor: Executor, make_grammars: GrammarBackendFactory | None = None
    ) -> None:
        server = msgspec.structs.replace(config.server, host="127.0.0.1", port=0)
        self.config = msgspec.structs.replace(config, server=server)
        self.executor = executor
        self.make_grammars = make_grammars
        self.io = IoThread(self.config)
        self.failure: BaseException | None = None

    @property
    def address(self) -> str:
        """host:port of the gRPC server."""
        return f"127.0.0.1:{self.io.port}"

    def start(self) -> "EngineServer":
        """Start to listen. The model is not loaded yet."""
        self.io.start()
        return self

    def load(self) -> "EngineServer":
        """Load the model and serve."""
        self.engine = build_engine(
            self.config, self.executor, self.make_grammars, lambda line: None, media_inputs(self.io)
        )
        self.engine.warm_up()
        self.control = EngineControl(self.engine)
        self.busy_loop = BusyLoop(self.engine, self.control, self.io.sessions)
        self.start_loop()
        if self.config.coordinator.address:  # the engine's address is known only now
            coordinator = msgspec.structs.replace(self.config.coordinator, advertise=self.address)
            self.io._config = msgspec.structs.replace(self.config, coordinator=coordinator)
        self.io.attach(self.busy_loop, describe(self.config, self.engine))
        return self

    def start_loop(self) -> None:
        """Start the thread of the busy loop."""
        self.thread = threading.Thread(target=self._run, name="busy-loop", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.busy_loop.run()
        except Exception as e:
            self.failure = e

    def stop(self) -> None:
        """Drain and stop the engine, as after a signal."""
        if hasattr(self, "thread"):
            self.busy_loop.request_shutdown()
            self.thread.join(60)
            assert not self.thread.is_alive()
            self.engine.shutdown()
        self.io.stop()


def wait_until(condition: Callable[[], bool], *, timeout: float = PATIENCE) -> None:
    """Wait until the condition is true. Raises AssertionError after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        threading.Event().wait(0.005)
