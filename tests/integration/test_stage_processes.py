"""Pipeline stages and tensor-parallel shards in separate processes: properties that tests with threads cannot show."""

import time
from pathlib import Path
from typing import Any

import pytest

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.worker_stats import WorkerStats
from tests.fakes.engines.in_process import build_engine
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.patience import PATIENCE
from tests.integration.test_stages import GREEDY, NEW_TOKENS, SECTIONS, expected, prompts, run

pytestmark = pytest.mark.slow

SEEDED = [SamplingParams(temperature=0.8, seed=i, top_p=0.9, max_tokens=NEW_TOKENS) for i in range(len(prompts()))]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 2)])
def test_tokens_are_those_of_transformers_and_seeded_ones_those_of_one_worker(
    tensor: int, pipeline: int, tmp_path: Path
) -> None:
    model = save_tiny_model("llama", tmp_path, num_hidden_layers=4)
    one = build_engine(tmp_path, **SECTIONS)
    seeded = run(one, "s", SEEDED)
    one.shutdown()
    executor = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    engine = build_engine(tmp_path, executor=executor, **SECTIONS)
    try:
        assert run(engine, "first", GREEDY) == expected(model)
        assert run(engine, "again", GREEDY) == expected(model)
        assert run(engine, "s", SEEDED) == seeded
        assert [stats.stage for stats in told(engine)] == [rank // tensor for rank in range(tensor * pipeline)]
    finally:
        engine.shutdown()


def told(engine: EngineCore) -> list[WorkerStats]:
    """Return the workers' statistics once every worker has reported statistics of its stage."""
    deadline = time.monotonic() + PATIENCE
    while any(stats.stage_idle is None for stats in engine.executor.worker_stats()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found: list[Any] = engine.executor.worker_stats()
    assert all(0 <= stats.stage_idle <= 1 for stats in found)
    return found
