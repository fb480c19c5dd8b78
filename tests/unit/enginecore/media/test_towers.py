"""Vision and audio encoders of a model: their weights, and configurations that do not support them."""

import msgspec
import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig, ExecutorConfig, ExpertParallelConfig, ModelConfig
from penstock_enginecore.config.engine import CoordinatorClientConfig
from penstock_enginecore.config.parallel import DataParallelConfig
from penstock_enginecore.media.towers import Towers, check_towers
from tests.fakes.models.fake_media_encoder import FakeMediaEncoder

CONFIG = EngineCoreConfig(model=ModelConfig(path="p"))


def test_weights_of_another_reading_are_copied_to_where_they_were() -> None:
    here, read = FakeMediaEncoder(4), FakeMediaEncoder(4)
    (weight,) = Towers(here).weights()
    address = weight.data_ptr()
    Towers(here).read(Towers(read))
    assert torch.equal(weight, *Towers(read).weights())
    assert weight.data_ptr() == address


def test_a_checkpoint_that_has_become_another_is_refused() -> None:
    with pytest.raises(RuntimeError, match="the checkpoint has changed since the engine started"):
        Towers(FakeMediaEncoder(4)).read(Towers(None))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            msgspec.structs.replace(CONFIG, executor=ExecutorConfig(pipeline_parallel_size=2)),
            "executor.pipeline_parallel_size is 2, which is not supported for a model that accepts image",
        ),
        (
            msgspec.structs.replace(
                CONFIG,
                data_parallel=DataParallelConfig(size=2),
                coordinator=CoordinatorClientConfig(address="c:1"),
                expert_parallel=ExpertParallelConfig(enabled=True),
            ),
            "expert_parallel.enabled is true, which is not supported for a model that accepts image",
        ),
    ],
)
def test_models_with_towers_are_refused_where_rows_do_not_go(config: EngineCoreConfig, named: str) -> None:
    check_towers(config, None)
    check_towers(CONFIG, FakeMediaEncoder(4))
    with pytest.raises(ConfigError, match=named):
        check_towers(config, FakeMediaEncoder(4))
