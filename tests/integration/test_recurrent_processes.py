"""Models with recurrent layers on worker processes: transformers' greedy tokens, also after sleep."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.models.tiny_models import save_tiny_model
from tests.integration.test_recurrent_parity import answers, engine_of, greedy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_processes")]
WAYS: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "ranks in stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ["qwen3_5", "granitemoehybrid", "zamba2"])
def test_processes_give_the_same_tokens_also_after_sleep(architecture: str, way: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    prompts, expected = answers(save_tiny_model(architecture, tmp_path))
    scheduler = {"max_num_batched_tokens": 24, "async_scheduling": True}
    engine = engine_of(tmp_path, executor={"kind": "multiproc", **WAYS[way]}, scheduler=scheduler)
    for turn in range(2):
        tokens, run = greedy(engine, prompts, prefix=f"{turn} ")
        assert tokens == expected, f"turn {turn}"
    assert run.stats.prefix_cache_hits > 0
    if way == "ranks":
        for level in (1, 2):
            engine.executor.collective_rpc("sleep", [level])
            engine.executor.collective_rpc("wake_up", [["weights", "kv_cache"]])
            assert engine.scheduler.reset_prefix_cache()
            assert greedy(engine, prompts, prefix=f"woken {level} ")[0] == expected
    engine.shutdown()
