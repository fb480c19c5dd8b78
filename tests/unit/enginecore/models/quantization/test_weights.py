"""A quantized checkpoint's tensors under the names that a model knows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock_common.checkpoint import problem
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.models.quantization.awq_gptq import Awq
from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.weights import DequantizedTensor, dense_weights, open_tensors
from penstock_enginecore.pooling.embedder import load_pooling_model
from tests.fakes.models.quantized_models import awq, float8, save_quantized_model

CPU = torch.device("cpu")
BLOCKS = Float8((32, 32), "_scale_inv")


def write(directory: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> None:
    save_file(tensors, directory / name)


def test_quantized_weights_stand_under_their_dense_names_and_others_stay(tmp_path: Path) -> None:
    parts, dense = awq("a.weight", torch.randn(16, 64))
    norm = torch.randn(4)
    write(tmp_path, {**parts, "norm.weight": norm})
    with open_tensors(tmp_path) as stored:
        found = dense_weights(stored, Awq(32), torch.bfloat16)
        assert sorted(found.tensors) == ["a.weight", "norm.weight"]
        assert isinstance(found.tensors["a.weight"], DequantizedTensor)
        assert torch.equal(found.tensors["a.weight"][...], dense.bfloat16())
        assert torch.equal(found.tensors["a.weight"][3:5], dense.bfloat16()[3:5])
        assert torch.equal(found.tensors["norm.weight"][...], norm)
    # 4 bits each, and for each group of a row a zero of 4 and a scale of 16.
    assert found.quantized_bytes == 16 * 64 // 2 + 16 * 2 * 5 // 2
    assert found.dense_bytes == 16 * 64 * 2


def test_a_layer_that_was_left_as_it_was_is_read_as_it_is(tmp_path: Path) -> None:
    parts, _ = float8("a.weight", torch.randn(32, 32), (32, 32), "_scale_inv")
    plain = torch.randn(8, 8, dtype=torch.bfloat16)
    write(tmp_path, {**parts, "lm_head.weight": plain})
    with open_tensors(tmp_path) as stored:
        found = dense_weights(stored, BLOCKS, torch.float32).tensors["lm_head.weight"]
        assert torch.equal(found[...], plain)


def test_nothing_is_read_before_a_weight_is(tmp_path: Path) -> None:
    class Untouched:
        def __init__(self, dtype: str, *shape: int) -> None:
            self.dtype, self.shape = dtype, list(shape)

        def get_shape(self) -> list[int]:
            return self.shape

        def get_dtype(self) -> str:
            return self.dtype

        def __getitem__(self, index: Any) -> torch.Tensor:
            raise AssertionError("read")

    stored = {"a.weight": Untouched("F8_E4M3", 32, 64), "a.weight_scale_inv": Untouched("F32", 1, 2)}
    found = dense_weights(stored, BLOCKS, torch.float32)
    assert (found.quantized_bytes, found.dense_bytes) == (32 * 64 + 8, 4 * 32 * 64)
    with pytest.raises(AssertionError, match="read"):
        found.tensors["a.weight"][...]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"a.weight_scale_inv": None}, r"a\.weight is fp8 by blocks of 32x32, but there is no a\.weight_scale_inv"),
        ({"a.weight_scale_inv": torch.zeros(1, 1).int()}, r"a\.weight_scale_inv is I32; .* it must be BF16 or F16"),
        (
            {"a.weight_scale_inv": torch.zeros(2, 1)},
            r"the weight a\.weight is not a valid fp8 .* has shape \[2, 1\]; it must be \[1, 1\]",
        ),
        (
            {"b.weight": torch.zeros(2, 2).to(torch.float8_e5m2)},
            r"b\.weight is F8_E5M2, which fp8 .* weights do not use",
        ),
    ],
)
def test_parts_that_are_missing_or_wrong_are_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    parts, _ = float8("a.weight", torch.randn(32, 32), (32, 32), "_scale_inv")
    write(tmp_path, {name: tensor for name, tensor in {**parts, **changes}.items() if tensor is not None})
    with open_tensors(tmp_path) as stored, pytest.raises(ModelLoadError, match=said):
        dense_weights(stored, BLOCKS, torch.float32)


def test_files_of_the_index_are_read_and_no_others(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1)}, "one.safetensors")
    write(tmp_path, {"b": torch.zeros(1)}, "two.safetensors")
    write(tmp_path, {"c": torch.zeros(1)}, "consolidated.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_tensors(tmp_path) as stored:
        assert sorted(stored) == ["a", "b"]


def test_files_of_other_names_are_read_where_there_is_no_model(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1)}, "gptq_model-4bit-128g.safetensors")
    with open_tensors(tmp_path) as stored:
        assert sorted(stored) == ["a"]
    write(tmp_path, {"b": torch.zeros(1)})
    with open_tensors(tmp_path) as stored:
        assert sorted(stored) == ["b"]


def test_weights_of_pickled_files_are_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"has no \*\.safetensors"), open_tensors(tmp_path):
        pass


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_quantized_model("llama", "fp8-blocks", tmp_path)
    return tmp_path


def change(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_model_that_was_dequantized_is_one_like_others(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model = load_model(ModelConfig(path=str(checkpoint), dtype="bfloat16"), CPU, lambda line: None)
    assert model.eos_token_ids == {7, 9}
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
    assert getattr(model.module.config, "quantization_config", None) is None


def test_static_scales_of_activations_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    expected = save_quantized_model("llama", "fp8-tensor", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layers = [name.removesuffix("weight") for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    write(tmp_path, {**tensors, **{f"{layer}input_scale": torch.tensor(0.5) for layer in layers}})
    change(tmp_path, quantization_config={"quant_method": "fp8", "activation_scheme": "static"})
    model = load_model(ModelConfig(path=str(tmp_path)), CPU, lambda line: None)
    assert (
        f"ignoring {len(layers)} activation scales, because the engine computes the scales of activations"
        in caplog.messages
    )
    meant = dict(expected.named_parameters())
    assert len(layers) == 14
    assert all(torch.equal(meant[name], found) for name, found in model.module.named_parameters())


def test_missing_weights_are_told_as_ever(checkpoint: Path) -> None:
    change(checkpoint, num_hidden_layers=3)
    with pytest.raises(ModelLoadError, match="9 weights are missing, for example model.layers.2"):
        load_model(ModelConfig(path=str(checkpoint)), CPU, lambda line: None)


def test_numbers_that_mean_nothing_are_told_with_the_weight(tmp_path: Path) -> None:
    save_quantized_model("llama", "gptq-desc-act", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.g_idx"][5] = 9
    write(tmp_path, tensors)
    with pytest.raises(
        ModelLoadError,
        match=r"the weight model\.layers\.1\.mlp\.up_proj\.weight is not a valid GPTQ, .* have 2 groups",
    ):
        load_model(ModelConfig(path=str(tmp_path)), CPU, lambda line: None)


@pytest.mark.parametrize("form", ["awq", "fp8-blocks"])
def test_models_that_pool_are_dequantized_as_well(form: str, tmp_path: Path) -> None:
    save_quantized_model("qwen3", form, tmp_path, dense=tmp_path / "dense")
    found, expected = (
        load_pooling_model(ModelConfig(path=str(path), task="embed"), "embed", CPU, lambda line: None)
        for path in (tmp_path, tmp_path / "dense")
    )
    weights = dict(expected.module.named_parameters())
    assert {
        name: torch.equal(weights[name], found) for name, found in found.module.named_parameters()
    } == dict.fromkeys(weights, True)


def test_a_way_that_is_not_served_is_told_before_weights_are_read(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"")
    quantization = {"quant_method": "gptq", "bits": 3}
    change(checkpoint, quantization_config=quantization)
    with pytest.raises(ModelLoadError, match="has 0 bytes"):
        load_model(ModelConfig(path=str(checkpoint)), CPU, lambda line: None)
    with pytest.raises(
        ModelLoadError, match=r"LlamaForCausalLM is not supported: quantization_config\.bits is 3; supported: 4, 8"
    ):
        load_model(ModelConfig(path=str(checkpoint), load_format="dummy"), CPU, lambda line: None)


def test_a_quantized_checkpoint_passes_the_first_look(checkpoint: Path) -> None:
    assert problem(str(checkpoint), tokenizer=False) == ""
