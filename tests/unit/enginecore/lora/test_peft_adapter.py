"""Adapters saved by PEFT have the same effect as in PEFT."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock_enginecore.lora.adapter import LoraAdapter
from penstock_enginecore.lora.errors import LoraError
from penstock_enginecore.lora.peft_adapter import LoraLimits, read_adapter
from penstock_enginecore.lora.target import AdapterTarget
from tests.fakes.models.adapters import CONFIG, TENSORS, edit_config, edit_tensors, merged, save_adapter
from tests.fakes.models.pooling_models import save_pooling_model
from tests.fakes.models.tiny_models import tiny_config

LIMITS = LoraLimits(max_rank=64)
FAMILIES = (
    "cohere",
    "gemma2",
    "gpt_bigcode",
    "gpt_neox",
    "llama",
    "minicpm3",
    "mistral",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "starcoder2",
)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32).eval()


def read(folder: Path, model: PreTrainedModel) -> LoraAdapter:
    return read_adapter(folder, AdapterTarget.of(model), LIMITS)


def assert_merges(adapter: LoraAdapter, base: PreTrainedModel, wanted: PreTrainedModel) -> None:
    """Check each layer's weight. It is W + B A in adapted layers, like PEFT's merged model, and the base model's in
    others.
    """
    changed = 0
    for name, module in base.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        weight = wanted.get_submodule(name).weight
        if update := adapter.updates.get(name):
            torch.testing.assert_close(module.weight + update.b @ update.a, weight, rtol=0, atol=1e-6)
            changed += 1
            assert not torch.equal(module.weight, weight)
        else:
            torch.testing.assert_close(module.weight, weight, rtol=0, atol=0)
    assert changed == len(adapter.updates) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_are_pefts_for_all_linear_layers(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    adapted = save_adapter(model, tmp_path, r=8, lora_alpha=4)
    adapter = read(tmp_path, model)
    assert_merges(adapter, model, merged(adapted))
    assert adapter.updates.keys() == AdapterTarget.of(model).all_linear


@pytest.mark.parametrize("rank", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_merged_weights_are_pefts_for_any_rank_and_scale(rank: int, use_rslora: bool, tmp_path: Path) -> None:
    model = tiny("llama")
    adapted = save_adapter(model, tmp_path, r=rank, lora_alpha=7, use_rslora=use_rslora)
    adapter = read(tmp_path, model)
    assert adapter.max_rank == rank
    assert adapter.num_bytes == sum(4 * rank * sum(shape) for shape in shapes(model, adapter))
    assert_merges(adapter, model, merged(adapted))


def shapes(model: PreTrainedModel, adapter: LoraAdapter) -> list[tuple[int, int]]:
    return [AdapterTarget.of(model).linears[name] for name in adapter.updates]


@pytest.mark.parametrize("use_rslora", [False, True])
def test_patterns_give_layers_their_ranks_and_scales(use_rslora: bool, tmp_path: Path) -> None:
    model = tiny("qwen2")
    adapted = save_adapter(
        model,
        tmp_path,
        r=4,
        lora_alpha=6,
        use_rslora=use_rslora,
        rank_pattern={"^model.layers.0.*_proj": 2, "k_proj": 7, "mlp.(up|gate)_proj": 3, "layers.1.mlp.down_proj": 5},
        alpha_pattern={"k_proj": 1, r"layers\.1\..*": 20, "model.layers.0.self_attn.q_proj": 0.25},
    )
    adapter = read(tmp_path, model)
    assert_merges(adapter, model, merged(adapted))
    ranks = {name.removeprefix("model.layers."): update.rank for name, update in adapter.updates.items()}
    assert ranks["0.self_attn.k_proj"] == 2
    assert ranks["1.self_attn.k_proj"] == 7
    assert ranks["1.mlp.up_proj"] == 3
    assert ranks["1.mlp.down_proj"] == 5
    assert ranks["1.self_attn.q_proj"] == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "model.layers.1.mlp.down_proj"]},
        {"target_modules": r".*layers\.[12]\.(self_attn\.[qv]_proj|mlp\.up_proj)"},
        {"target_modules": "all-linear", "exclude_modules": ["up_proj", "layers.0.self_attn.q_proj"]},
        {"target_modules": "all-linear", "exclude_modules": r".*\.0\..*"},
        {"target_modules": ATTENTION, "layers_to_transform": 1},
        {"target_modules": ATTENTION, "layers_to_transform": [0, 2], "layers_pattern": "layers"},
        {
            "target_modules": ["v_proj", "model.layers.0.mlp.up_proj"],
            "layers_to_transform": [1],
            "layers_pattern": ["h", "layers"],
        },
        {"target_modules": ATTENTION, "init_lora_weights": "gaussian"},
        {"target_modules": ATTENTION, "init_lora_weights": True},
        {"target_modules": ATTENTION, "task_type": None},
        {"target_modules": ["gate_proj"], "lora_dropout": 0.1, "lora_alpha": -3},
    ],
    ids=str,
)
def test_layers_are_those_that_peft_chose(settings: dict[str, Any], tmp_path: Path) -> None:
    model = tiny("llama", num_hidden_layers=3)
    adapted = save_adapter(model, tmp_path, **settings)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    adapted.save_pretrained(tmp_path)
    assert_merges(read(tmp_path, model), model, merged(adapted))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_an_lm_head_takes_an_update_beside_the_copy_of_its_weights_that_peft_saves(tied: bool, tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=tied)
    adapted = save_adapter(model, tmp_path, target_modules=["lm_head", "q_proj"])
    assert "base_model.model.lm_head.base_layer.weight" in load_file(tmp_path / TENSORS)
    adapter = read(tmp_path, model)
    tokens = torch.arange(3, 20)[None]
    hidden = adapted.get_base_model().model(tokens).last_hidden_state
    update = adapter.updates["lm_head"]
    expected = model.lm_head(hidden) + hidden @ update.a.T @ update.b.T
    torch.testing.assert_close(expected, adapted(tokens).logits, rtol=1e-5, atol=1e-5)


def test_the_copy_of_an_lm_heads_weights_may_be_rounded(tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=False)
    save_adapter(model, tmp_path, target_modules=["lm_head"])

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        name = "base_model.model.lm_head.base_layer.weight"
        tensors[name] = tensors[name].bfloat16()

    edit_tensors(tmp_path, narrow)
    assert list(read(tmp_path, model).updates) == ["lm_head"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_tensors_are_widened_before_they_are_scaled(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny("llama")
    save_adapter(model, tmp_path, r=4, lora_alpha=3)
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: each.to(dtype) for name, each in tensors.items()}))
    stored = load_file(tmp_path / TENSORS)
    for name, update in read(tmp_path, model).updates.items():
        assert update.a.dtype == update.b.dtype == torch.float32
        assert torch.equal(update.a, stored[f"base_model.model.{name}.lora_A.weight"].float())
        assert torch.equal(update.b, stored[f"base_model.model.{name}.lora_B.weight"].float() * 0.75)


def test_tensors_that_lie_at_odd_places_are_read(tmp_path: Path) -> None:
    model = tiny("llama")
    save_adapter(model, tmp_path, r=1, target_modules=["q_proj"], lora_alpha=1)
    wanted = read(tmp_path, model)
    tensors = load_file(tmp_path / TENSORS)
    entries, data = {}, b""
    for name in sorted(tensors, key=lambda name: "lora_B" in name):
        narrow = "layers.0.self_attn.q_proj.lora_A" in name
        values = (tensors[name][:, :] if not narrow else tensors[name].half()).numpy().tobytes()
        dtype = "F16" if narrow else "F32"
        entries[name] = {
            "dtype": dtype,
            "shape": list(tensors[name].shape),
            "data_offsets": [len(data), len(data) + len(values)],
        }
        data += values
    header = json.dumps(entries).encode() + b" " * 3  # a length that is not aligned
    (tmp_path / TENSORS).write_bytes(len(header).to_bytes(8, "little") + header + data)
    for name, update in read(tmp_path, model).updates.items():
        torch.testing.assert_close(update.a, wanted.updates[name].a, rtol=1e-3, atol=1e-3)
        assert torch.equal(update.b, wanted.updates[name].b)


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "llama", "qwen3"])
def test_models_that_pool_take_adapters(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, tmp_path / "model")
    adapted = save_adapter(model, tmp_path / "adapter", task_type="FEATURE_EXTRACTION")
    assert_merges(read(tmp_path / "adapter", model), model, merged(adapted))


@pytest.mark.parametrize("trained_with_a_head", [True, False])
def test_names_with_and_without_the_prefix_of_a_head_are_the_same_layers(
    trained_with_a_head: bool, tmp_path: Path
) -> None:
    whole = tiny("llama", num_hidden_layers=3)
    bare = copy.deepcopy(whole.model)
    trained, served = (whole, bare) if trained_with_a_head else (bare, whole)
    prefix = "model." if trained_with_a_head else ""
    save_adapter(
        trained,
        tmp_path,
        target_modules=rf"{prefix}layers\.[02]\.self_attn\.q_proj",
        rank_pattern={f"^{prefix}layers.2.self_attn.q_proj": 3},
        task_type=None,
    )
    there, here = read(tmp_path, trained), read(tmp_path, served)
    assert [update.rank for update in here.updates.values()] == [8, 3]
    ours = "" if trained_with_a_head else "model."
    assert list(here.updates) == [f"{ours}layers.0.self_attn.q_proj", f"{ours}layers.2.self_attn.q_proj"]
    for one, other in zip(there.updates.values(), here.updates.values(), strict=True):
        assert torch.equal(one.b, other.b)


@pytest.mark.parametrize("written", ["default", "no prefix"])
def test_names_that_other_versions_write_are_known(written: str, tmp_path: Path) -> None:
    model = tiny("llama")
    save_adapter(model, tmp_path)
    wanted = read(tmp_path, model)
    tensors = load_file(tmp_path / TENSORS)
    if written == "default":
        tensors = {name.replace(".weight", ".default.weight"): each for name, each in tensors.items()}
    else:
        tensors = {name.removeprefix("base_model.model."): each for name, each in tensors.items()}
    save_file(tensors, tmp_path / TENSORS)
    assert read(tmp_path, model).digest == wanted.digest


def test_settings_of_an_early_version_are_enough(tmp_path: Path) -> None:
    model = tiny("llama")
    adapted = save_adapter(model, tmp_path, target_modules=["q_proj", "v_proj"], r=4, lora_alpha=8)
    early = {
        "base_model_name_or_path": "decapoda-research/llama-7b-hf",
        "bias": "none",
        "enable_lora": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "merge_weights": False,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }
    (tmp_path / CONFIG).write_text(json.dumps(early))
    assert_merges(read(tmp_path, model), model, merged(adapted))


@pytest.mark.filterwarnings("ignore")  # ignore PEFT's warnings
def test_pissa_is_read_once_it_is_converted(tmp_path: Path) -> None:
    model = tiny("llama")
    adapted = save_adapter(
        model, tmp_path / "unused", init_lora_weights="pissa", r=4, target_modules=["q_proj", "up_proj"]
    )
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(tmp_path / "initial")
    adapted.peft_config["default"].init_lora_weights = "pissa"
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    adapter = read(tmp_path / "adapter", model)
    assert adapter.max_rank == 8
    trained = merged(adapted)
    for name, update in adapter.updates.items():
        weight = model.get_submodule(name).weight + update.b @ update.a
        torch.testing.assert_close(weight, trained.get_submodule(name).weight, rtol=0, atol=1e-5)


def test_memory_holds_the_updates_alone(tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=False)
    save_adapter(model, tmp_path, target_modules=["lm_head", "q_proj"])
    adapter = read(tmp_path, model)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for update in adapter.updates.values()
        for tensor in (update.a, update.b)
    }
    assert sum(storages.values()) == adapter.num_bytes


def test_a_model_of_another_name_is_told_and_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    save_adapter(model, tmp_path)
    edit_config(tmp_path, base_model_name_or_path="/home/alice/models/base-v2")
    target = AdapterTarget.of(model)
    with caplog.at_level("INFO"):
        read_adapter(tmp_path, AdapterTarget("/models/base-v1", target.linears, heads=target.heads), LIMITS)
    assert "was trained on /home/alice/models/base-v2, but this engine serves /models/base-v1" in caplog.text


@pytest.mark.parametrize(("base", "told"), [("/home/alice/base-v2", True), ("/home/alice/base-v1", False)])
def test_a_refusal_names_the_model_that_it_was_trained_on(tmp_path: Path, base: str, told: bool) -> None:
    save_adapter(tiny("llama", intermediate_size=96), tmp_path, target_modules=["up_proj"])
    edit_config(tmp_path, base_model_name_or_path=base)
    target = AdapterTarget.of(tiny("llama"))
    with pytest.raises(LoraError, match="the tensor's shape is wrong") as refused:
        read_adapter(tmp_path, AdapterTarget("/models/base-v1", target.linears, heads=target.heads), LIMITS)
    assert (f"; the adapter was trained on '{base}', and this model is 'base-v1'" in str(refused.value)) is told
