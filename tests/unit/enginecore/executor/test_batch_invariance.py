"""Where batch invariance is refused before anything is loaded, and where it is not."""

from typing import Any

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig, ExecutorConfig, KernelsConfig, ModelConfig
from penstock_enginecore.executor.loading import check_batch_invariant, load_runner


def check(
    device: str = "cuda", backend: str = "auto", task: str = "generate", workers: int = 1, **kernels: Any
) -> None:
    config = EngineCoreConfig(
        model=ModelConfig(path="model", attention_backend=backend),
        executor=ExecutorConfig(tensor_parallel_size=workers),
        kernels=KernelsConfig(**{"batch_invariant": True} | kernels),
    )
    check_batch_invariant(config, torch.device(device), task)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_model_that_a_decoder_may_serve_is_loaded(device: str) -> None:
    check(device)
    check(device, task="embed", batch_invariant=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decoder": False}, "kernels.decoder is false"),
        ({"device": "cpu", "isa": "off"}, "kernels.isa is 'off'"),
        ({"device": "cpu", "attention": False}, "kernels.attention is false"),
        ({"backend": "triton"}, "model.attention_backend is 'triton', and only with 'auto'"),
        ({"task": "embed"}, "the model is to embed, and decoders only generate"),
        ({"workers": 2}, "the executor has 2 workers, and it is a property of one"),
    ],
)
def test_where_no_decoder_is_tried_it_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"kernels.batch_invariant is true but {said}"):
        check(**changes)
    check(**changes, batch_invariant=False)


@pytest.mark.parametrize("kernels", [{"isa": "off"}, {"attention": False}])
def test_what_only_cpus_need_is_not_asked_of_gpus(kernels: dict[str, Any]) -> None:
    check("cuda", **kernels)


def test_an_engine_is_told_before_its_weights_are_read() -> None:
    kernels = KernelsConfig(isa="off", batch_invariant=True)
    config = EngineCoreConfig(model=ModelConfig(path="/nowhere", task="generate"), kernels=kernels)
    with pytest.raises(ConfigError, match="kernels.batch_invariant is true but kernels.isa is 'off'"):
        load_runner(config, torch.device("cpu"), lambda line: None)
