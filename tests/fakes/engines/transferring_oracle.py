"""Oracle engine that sends and receives KV blocks: ``python -m tests.fakes.engines.transferring_oracle --config
engine.yaml``.

It is like ``oracle_service``, but its KV cache has content. Each block is checked before a step that uses it, and
blocks go to other engines as bytes.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from penstock_common.config.loader import from_command_line
from penstock_common.config_file import ConfigFile
from penstock_common.memory import use_few_arenas
from penstock_enginecore.app import run
from penstock_enginecore.config import EngineCoreConfig
from tests.fakes.engines.fake_copier import FakeCopier
from tests.fakes.engines.oracle_service.executor import PacedExecutor
from tests.fakes.engines.oracle_service.pace import Pace

BLOCK_SIZE = 16
_SLOT_BYTES = 32
"""Maximum size of the text of a slot's content."""
STEP_SECONDS = 0.002


class SteadyCopier(FakeCopier):
    """Thread-safe copier that copies blocks of one size immediately."""

    block_bytes = BLOCK_SIZE * _SLOT_BYTES

    def __init__(self, kv: dict[int, Any], block_size: int, run_steps: Callable[[], None]) -> None:
        super().__init__(kv, block_size, run_steps)
        self._one_at_a_time = threading.Lock()
        self.at_once = True

    def read(self, block_ids: Sequence[int]) -> "Future[list[bytes]]":
        with self._one_at_a_time:
            contents = super().read(block_ids).result()
        future: Future[list[bytes]] = Future()
        future.set_result([content.ljust(self.block_bytes) for content in contents])
        return future

    def write(self, block_ids: Sequence[int], contents: Sequence[bytes]) -> "Future[None]":
        with self._one_at_a_time:
            return super().write(block_ids, contents)


class TransferringExecutor(PacedExecutor):
    """``PacedExecutor`` with a KV cache whose content is checked and copied."""

    def __init__(self, config: EngineCoreConfig) -> None:
        super().__init__(config, Pace(step_seconds=STEP_SECONDS))
        self._check_kv = True
        self.copier = SteadyCopier(self._kv, self._block_size, self.work)


def main() -> None:
    """Serve until a signal. Raises ConfigError."""
    config_file = ConfigFile(from_command_line(EngineCoreConfig, prog="transferring-oracle", description=__doc__ or ""))
    use_few_arenas()
    make: Any = TransferringExecutor
    run(config_file, make)


if __name__ == "__main__":
    main()
