"""A worker's place among the workers of its engine."""

import pytest

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig, ModelConfig
from penstock_enginecore.worker.messages import WorkerConfig

ENGINE = EngineCoreConfig(model=ModelConfig(path="m"))


def test_an_engine_of_one_worker_is_the_default() -> None:
    config = WorkerConfig(engine=ENGINE)
    assert (config.rank, config.world_size) == (0, 1)


@pytest.mark.parametrize(("rank", "world_size", "name"), [(2, 2, "rank"), (-1, 2, "rank"), (0, 0, "world_size")])
def test_a_rank_that_is_none_is_refused(rank: int, world_size: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"worker.{name}"):
        WorkerConfig(engine=ENGINE, rank=rank, world_size=world_size)
