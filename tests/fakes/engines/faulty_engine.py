"""Engine process that is real except for its executor, and fails on demand: ``python -m
tests.fakes.engines.faulty_engine --config ...``. Needs no torch.

``FAULTY_ENGINE`` in the environment names a JSON file with ``Faults``, which is read at every step. ``FAULTY_VERSION``,
if set, is the version that the process reports.
"""

import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import msgspec

from penstock_common.config.loader import from_command_line
from penstock_common.config_file import ConfigFile
from penstock_common.observability import metrics
from penstock_enginecore.app import run
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.scheduler.output import DraftTokenIds, GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.lora.core.request import LoadedLora
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.models.small_tokenizers import byte_level

MAX_LEN = 1024
KV_CACHE_MEMORY = 2**15
"""Size of the KV cache in bytes: 64 blocks of 16 tokens, fewer than four sequences of maximum length need."""

ADAPTER = "/adapters/pirate"
"""Directory of a LoRA adapter."""


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Faults of the engine.

    Attributes:
        hold: The current step does not end until this is reset.
        nan: The logits of every row are NaN.
        drafter_fails: The drafter has failed.
        step_seconds: Duration of a step.
    """

    hold: bool = False
    nan: bool = False
    drafter_fails: bool = False
    step_seconds: float = 0.01


class FaultyExecutor(FakeExecutor):
    """Executor with known tokens, and with the step time and the faults that the file sets."""

    def __init__(self, config: EngineCoreConfig, file: Path) -> None:
        super().__init__(
            vocab_size=byte_level().get_vocab_size(),
            model_max_len=MAX_LEN,
            block_size=config.cache.block_size,
            available_memory=KV_CACHE_MEMORY,
            check_kv=False,
        )
        self._file = file
        self.adapters[ADAPTER] = LoadedLora(bytes(range(16)), 8, ("q_proj",), 2**20)

    @property
    def faults(self) -> Faults:
        """Return the current content of the file."""
        return msgspec.json.decode(self._file.read_bytes(), type=Faults)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        while self.faults.hold:
            time.sleep(0.05)
        time.sleep(self.faults.step_seconds)
        super().execute_model(scheduler_output)
        self.steps.clear()

    def sample_tokens(self, grammar: GrammarBitmask | None = None) -> "Future[ModelRunnerOutput]":
        future = super().sample_tokens(grammar)
        if self.faults.nan:
            result = future.result()
            result.num_nans_in_logits = dict.fromkeys(result.request_ids, 1)
        return future

    def take_draft_token_ids(self) -> "Future[DraftTokenIds]":
        if not self.faults.drafter_fails:
            return super().take_draft_token_ids()
        future: Future[DraftTokenIds] = Future()
        future.set_result(DraftTokenIds(failure="RuntimeError: made to fail"))
        return future


def main() -> None:
    """Serve until SIGTERM."""
    if version := os.environ.get("FAULTY_VERSION"):
        metrics.service_version = lambda: version
    config_file = ConfigFile(from_command_line(EngineCoreConfig, prog="faulty-engine", description=__doc__ or ""))
    run(config_file, lambda config: FaultyExecutor(config, Path(os.environ["FAULTY_ENGINE"])))


if __name__ == "__main__":
    sys.exit(main())
