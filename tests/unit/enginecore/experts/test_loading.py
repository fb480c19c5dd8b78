"""Parts of a checkpoint that a rank reads, and checkpoints that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import (
    CoordinatorClientConfig,
    DataParallelConfig,
    EngineCoreConfig,
    ExecutorConfig,
    ExpertParallelConfig,
    ModelConfig,
)
from penstock_enginecore.experts import loading as loading_module
from penstock_enginecore.experts.layer import DispatchedExperts
from penstock_enginecore.experts.loading import ExpertReader, SharedModel, check_shared
from penstock_enginecore.models import loader as loader_module
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.models.quantization.weights import open_tensors
from tests.fakes.models.tiny_models import save_tiny_model

CPU = torch.device("cpu")


def config(size: int = 2, slots: int = 0, **executor: Any) -> EngineCoreConfig:
    return EngineCoreConfig(
        model=ModelConfig(path="model"),
        coordinator=CoordinatorClientConfig(address="none:1"),
        data_parallel=DataParallelConfig(size=size, min_size=size),
        expert_parallel=ExpertParallelConfig(enabled=True, slots=slots),
        executor=ExecutorConfig(**executor),
    )


def load(path: Path, shared: SharedModel, **model: Any) -> LoadedModel:
    return load_model(ModelConfig(path=str(path), **model), CPU, lambda line: None, make_share=shared)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of tensors that were read from files since the set was cleared."""
    names: set[str] = set()

    class Watched:
        def __init__(self, name: str, tensor: Any) -> None:
            self._name, self._tensor = name, tensor

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tensor, name)

        def __getitem__(self, index: Any) -> torch.Tensor:
            names.add(self._name)
            return self._tensor[index]  # type: ignore[no-any-return]

    for method in ("tensors", "experts_of"):
        own = getattr(loading_module.ExpertShare, method)

        def watched(share: Any, *args: Any, own: Any = own) -> dict[str, Any]:
            stored = {name: Watched(name, tensor) for name, tensor in args[-1].items()}
            return own(share, *args[:-1], stored)  # type: ignore[no-any-return]

        monkeypatch.setattr(loading_module.ExpertShare, method, watched)
    return names


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("qwen3_moe", "mlp.experts"),
        ("mixtral", "mlp.experts"),
        ("granitemoe", "block_sparse_moe.experts"),
        ("gpt_oss", "mlp.experts"),
    ],
)
def test_all_but_experts_is_whole_and_any_experts_can_be_read(family: str, experts: str, tmp_path: Path) -> None:
    whole: Any = save_tiny_model(family, tmp_path)
    shared = SharedModel(config())
    module = load(tmp_path, shared).module
    own = {name.replace(".experts.experts.", ".experts."): weight for name, weight in module.named_parameters()}
    assert own.keys() == dict(whole.named_parameters()).keys()
    for name, weight in whole.named_parameters():
        assert torch.equal(own[name], weight[[0, 0]] if experts in name else weight), name
    reader = ExpertReader(shared.share, tmp_path, torch.float32)
    for layer, held in ((1, [3, 1, 0]), (0, [2]), (1, [3])):
        for name, weight in reader.read(layer, held).items():
            assert torch.equal(weight, whole.get_submodule(shared.share.names[layer]).get_parameter(name)[held]), name


def test_other_experts_are_not_read(tmp_path: Path, read: set[str]) -> None:
    save_tiny_model("qwen3_moe", tmp_path)
    shared = SharedModel(config())
    load(tmp_path, shared)
    with open_tensors(tmp_path) as stored:
        experts = {name for name in stored if ".experts." in name}
        assert read == stored.keys() - {name for name in experts if ".experts.0." not in name}
    read.clear()
    ExpertReader(shared.share, tmp_path, torch.float32).read(1, [1, 3])
    assert read == {name for name in experts if name.startswith("model.layers.1.") and ".experts.0." not in name} - {
        name for name in experts if ".experts.2." in name
    }


def test_files_that_are_gone_or_lack_an_expert_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("qwen3_moe", tmp_path)
    shared = SharedModel(config())
    load(tmp_path, shared)
    reader = ExpertReader(shared.share, tmp_path, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(loading_module.ExpertShare, "experts_of", lambda *args: {})
        with pytest.raises(ModelLoadError, match=r"experts 1 of model.layers.0.mlp.experts are incomplete: down_proj"):
            reader.read(0, [1])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"cannot read .*experts 1, 2 of model.layers.1.mlp.experts"):
        reader.read(1, [1, 2])


@pytest.mark.parametrize("family", ["llama", "jetmoe", "llama4_text"])
def test_a_model_without_a_plan_is_refused(family: str, tmp_path: Path) -> None:
    whole = save_tiny_model(family, tmp_path)
    with pytest.raises(
        ModelLoadError, match=f"expert_parallel: transformers has no expert parallel plan for {type(whole).__name__}"
    ):
        load(tmp_path, SharedModel(config()))


def test_sizes_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    save_tiny_model("qwen3_moe", tmp_path)
    with pytest.raises(
        ConfigError, match="data_parallel.size is 5; it must be at most 4, the model's number of experts"
    ):
        load(tmp_path, SharedModel(config(5)))
    with pytest.raises(
        ConfigError, match="expert_parallel.slots is 1; 2 ranks need at least 2 slots each for the model's 4 experts"
    ):
        load(tmp_path, SharedModel(config(slots=1)))
    with pytest.raises(ConfigError, match="expert_parallel.slots is 5; it must be at most 4"):
        load(tmp_path, SharedModel(config(slots=5)))


def test_random_and_quantized_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("qwen3_moe", tmp_path)
    with pytest.raises(ModelLoadError, match="model.load_format is 'dummy'"):
        load(tmp_path, SharedModel(config()), load_format="dummy")

    class Scheme:
        name = "fp8"

    monkeypatch.setattr(loader_module, "quantization_of", lambda config: Scheme())
    with pytest.raises(ModelLoadError, match="fp8 experts cannot be shared between ranks yet"):
        load(tmp_path, SharedModel(config()))


def test_engines_that_do_not_share_experts_yet_are_refused() -> None:
    with pytest.raises(ConfigError, match="model.device is 'cuda'"):
        check_shared(config(), torch.device("cuda"), "generate")
    with pytest.raises(ConfigError, match="the model's task is embed"):
        check_shared(config(), CPU, "embed")
    with pytest.raises(ConfigError, match="executor.kind is 'multiproc'"):
        check_shared(config(kind="multiproc"), CPU, "generate")
    check_shared(config(), CPU, "generate")
    with pytest.raises(ConfigError, match="expert_parallel.enabled is true, but data_parallel.size is 1"):
        config(1)


def test_what_dispatches_stands_where_experts_were(tmp_path: Path) -> None:
    save_tiny_model("deepseek_v3", tmp_path)
    module: Any = load(tmp_path, SharedModel(config())).module
    assert isinstance(module.model.layers[1].mlp.experts, DispatchedExperts)
    assert not hasattr(module.model.layers[0].mlp, "experts")
