"""What a rank reads of a checkpoint, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ExpertParallelConfig, ModelConfig
from penstock_enginecore.experts import loading as loading_module
from penstock_enginecore.experts.layer import DispatchedExperts
from penstock_enginecore.experts.placement import Placement
from penstock_enginecore.experts.rank import ExpertRank, check_spread
from penstock_enginecore.experts.spread import dispatched_layers
from penstock_enginecore.models import loader as loader_module
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.models.quantization.weights import open_tensors
from tests.fakes.models.tiny_models import save_tiny_model

CPU = torch.device("cpu")


def load(path: Path, rank: ExpertRank, **model: Any) -> LoadedModel:
    return load_model(ModelConfig(path=str(path), **model), CPU, lambda line: None, make_share=rank)


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("qwen3_moe", "mlp.experts"),
        ("mixtral", "mlp.experts"),
        ("granitemoe", "block_sparse_moe.experts"),
        ("gpt_oss", "mlp.experts"),
    ],
)
def test_slots_hold_the_rows_of_their_experts_and_all_else_is_whole(family: str, experts: str, tmp_path: Path) -> None:
    whole: Any = save_tiny_model(family, tmp_path)
    placement = Placement(4, 2, 3, ((3, 1, 0, 2, 3, 1), (0, 1, 2, 3, 0, 1)))
    module = load(tmp_path, ExpertRank(0, lambda layers, count: placement)).module
    own = {name.replace(".experts.experts.", ".experts."): weight for name, weight in module.named_parameters()}
    assert own.keys() == dict(whole.named_parameters()).keys()
    for name, weight in whole.named_parameters():
        held = placement.held(0, int(name.split(".")[2])) if experts in name else ...
        assert torch.equal(own[name], weight[list(held)] if held is not ... else weight), name
    assert [layer.held for layer in dispatched_layers(module)] == [(3, 1, 0), (0, 1, 2)]


def test_experts_of_other_ranks_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("qwen3_moe", tmp_path)
    read: set[str] = set()

    class Watched:
        def __init__(self, name: str, tensor: Any) -> None:
            self._name, self._tensor = name, tensor

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tensor, name)

        def __getitem__(self, index: Any) -> torch.Tensor:
            read.add(self._name)
            return self._tensor[index]  # type: ignore[no-any-return]

    own = loading_module.ExpertShare.tensors

    def tensors(share: Any, stored: Any) -> dict[str, Any]:
        return own(share, {name: Watched(name, tensor) for name, tensor in stored.items()})

    monkeypatch.setattr(loading_module.ExpertShare, "tensors", tensors)
    load(tmp_path, ExpertRank.of(1, 2, ExpertParallelConfig(slots=0)))
    with open_tensors(tmp_path) as stored:
        others = {name for name in stored if ".experts.0." in name or ".experts.1." in name}
        assert len(others) == 2 * 2 * 3
        assert read == stored.keys() - others


@pytest.mark.parametrize("family", ["llama", "jetmoe", "llama4_text"])
def test_a_model_without_a_plan_is_refused(family: str, tmp_path: Path) -> None:
    whole = save_tiny_model(family, tmp_path)
    with pytest.raises(ModelLoadError, match=f"expert_parallel: {type(whole).__name__} has no plan for it"):
        load(tmp_path, ExpertRank.of(0, 2, ExpertParallelConfig(slots=0)))


def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    save_tiny_model("qwen3_moe", tmp_path)
    with pytest.raises(ConfigError, match="the group has 5 ranks; the model's 4 experts go to at most as many"):
        load(tmp_path, ExpertRank.of(0, 5, ExpertParallelConfig(slots=0)))
    with pytest.raises(ConfigError, match="expert_parallel.slots is 1; 2 ranks hold the model's 4 experts"):
        load(tmp_path, ExpertRank.of(0, 2, ExpertParallelConfig(slots=1)))


def test_random_and_quantized_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("qwen3_moe", tmp_path)
    with pytest.raises(ModelLoadError, match="model.load_format is 'dummy'"):
        load(tmp_path, ExpertRank.of(0, 2, ExpertParallelConfig(slots=0)), load_format="dummy")

    class Scheme:
        name = "fp8"

    monkeypatch.setattr(loader_module, "quantization_of", lambda config: Scheme())
    with pytest.raises(ModelLoadError, match="fp8 experts are not shared by ranks yet"):
        load(tmp_path, ExpertRank.of(0, 2, ExpertParallelConfig(slots=0)))


def test_engines_that_are_not_served_so_yet_are_refused() -> None:
    def config(**executor: Any) -> EngineCoreConfig:
        return EngineCoreConfig(
            model=ModelConfig(path="model"), cache=CacheConfig(), executor=ExecutorConfig(**executor)
        )

    with pytest.raises(ConfigError, match="model.device is cuda"):
        check_spread(config(), torch.device("cuda"), "generate")
    with pytest.raises(ConfigError, match="models that embed"):
        check_spread(config(), CPU, "embed")
    with pytest.raises(ConfigError, match="ranks of 2 workers"):
        check_spread(config(tensor_parallel_size=2), CPU, "generate")
    check_spread(config(), CPU, "generate")


def test_what_dispatches_stands_where_experts_were(tmp_path: Path) -> None:
    save_tiny_model("deepseek_v3", tmp_path)
    module: Any = load(tmp_path, ExpertRank.of(0, 2, ExpertParallelConfig(slots=0))).module
    assert isinstance(module.model.layers[1].mlp.experts, DispatchedExperts)
    assert not hasattr(module.model.layers[0].mlp, "experts")
