"""Executor with known tokens and configurable step times. It reads only ``config.json`` of a checkpoint."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.engines.oracle_service.pace import Pace

CHECKPOINTS_CACHE = 2**30
"""Size of the KV cache in bytes if the config does not set it."""


class PacedExecutor(FakeExecutor):
    """A ``FakeExecutor`` with the sizes of the checkpoint that the config names.

    Its KV cache has no content, but uses as many blocks as a real one. Steps run one after another on a thread that
    sleeps for ``pace.step_seconds`` per step. No token ends a sequence, so outputs are as long as requested.
    """

    def __init__(self, config: EngineCoreConfig, pace: Pace, sleep: Callable[[float], None] = time.sleep) -> None:
        """Create the executor. Raises ModelLoadError if there is no checkpoint of a causal language model."""
        self._checkpoint = _read(config.model.path)
        self._pace = pace
        self._sleep = sleep
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")
        super().__init__(
            vocab_size=self._number("vocab_size"),
            model_max_len=self._number("max_position_embeddings"),
            block_size=config.cache.block_size,
            available_memory=CHECKPOINTS_CACHE,
            check_kv=False,
        )

    def load_model(self, progress: Progress) -> ModelInfo:
        progress(f"loading nothing for {self._pace.load_seconds:g} s")
        self._sleep(self._pace.load_seconds)
        return super().load_model(progress)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        heads = self._number("num_attention_heads")
        head_size = self._checkpoint.get("head_dim") or self._number("hidden_size") // heads
        spec = KVCacheSpec(
            block_size=self._block_size,
            num_kv_heads=self._checkpoint.get("num_key_value_heads") or heads,
            head_size=head_size,
            head_size_v=head_size,
            dtype_size=4,
        )
        return {f"layer.{i}": spec for i in range(self._number("num_hidden_layers"))}

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        super().execute_model(scheduler_output)
        self.steps.clear()  # free memory, because the process runs for hours

    def sample_tokens(self, grammar: GrammarBitmask | None = None) -> "Future[ModelRunnerOutput]":
        sampled = super().sample_tokens(grammar)
        return self._device.submit(self._when_due, sampled)

    def collective_rpc(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        result = super().collective_rpc(method, arguments)
        self.rpcs.clear()
        return result

    def shutdown(self) -> None:
        self._device.shutdown()
        super().shutdown()

    def _when_due(self, sampled: "Future[ModelRunnerOutput]") -> ModelRunnerOutput:
        self._sleep(self._pace.step_seconds)
        return sampled.result()

    def _number(self, key: str) -> int:
        value = self._checkpoint.get(key)
        if not isinstance(value, int):
            raise ModelLoadError(f"config.json: {key} is {value!r}; the oracle engine needs a whole number")
        return value


def _read(path: str) -> dict[str, Any]:
    file = Path(path) / "config.json"
    try:
        values: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError) as e:
        raise ModelLoadError(
            f"model.path is {path!r}; the oracle engine reads config.json from a directory: {e}"
        ) from e
    return values
