"""Multi-token-prediction layers: the same tokens as without drafts, plain torch's drafts, and refused checkpoints."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock_common.errors import ConfigError
from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.in_process import answer, generate
from tests.fakes.models.adapters import save_adapter
from tests.fakes.models.mtp_layers import (
    FAMILIES,
    MIXTURES,
    Reference,
    add_tensors,
    merged,
    random_layer,
    save_guessable_model,
    save_mtp_model,
)
from tests.fakes.models.quantized_models import FORMATS, is_quantized, save_quantized_model
from tests.fakes.models.tiny_models import save_narrow_model, save_tiny_model
from tests.integration.test_drafters import SETTINGS, engine_of, expect_the_same_behind_sleep, requests
from tests.integration.test_eagle import Seen
from tests.integration.test_multimodal_engine import Case

MTP: dict[str, Any] = {"method": "mtp", "adaptive": False, "num_speculative_tokens": 4}
HIDDEN = 48
FORMS = ("fp8-blocks", "awq", "compressed-int4-asymmetric")
"""One each of floats, of integers by columns and of integers by rows."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints whose layers often guess right, by family."""
    torch.set_num_threads(1)
    paths = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, path in paths.items():
        save_guessable_model(family, path)
    return paths


def counts_of(run: Any) -> Any:
    return run.stats.spec_decoding_stats


@pytest.mark.each_value
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without(models: dict[str, Path], family: str, setting: str, temperature: float) -> None:
    sections = SETTINGS[setting]
    expected = generate(engine_of(models[family], **sections), requests(temperature)).tokens
    engine = engine_of(models[family], {**MTP, "draft_sampling": "coupled"}, **sections)
    for _ in range(2):  # the second time on prefixes
        run = generate(engine, requests(temperature))
        assert run.tokens == expected
    assert not engine.scheduler.drafter_failure
    counts = counts_of(run)
    assert 30 < counts.num_accepted_tokens < counts.num_draft_tokens
    if setting == "few blocks":
        assert run.stats.num_preemptions > 0
    else:
        assert run.stats.prefix_cache_hits > 0


@pytest.mark.parametrize("count", [1, 15])
def test_every_number_of_drafts_gives_the_same_tokens(models: dict[str, Path], count: int) -> None:
    """Fifteen drafts reach from one span of a recurrent layer into the next."""
    expected = generate(engine_of(models["qwen3_5"]), requests(0.0)).tokens
    run = generate(engine_of(models["qwen3_5"], {**MTP, "num_speculative_tokens": count}), requests(0.0))
    assert run.tokens == expected
    assert counts_of(run).num_accepted_tokens_per_pos[0] > 20
    assert len(counts_of(run).num_accepted_tokens_per_pos) == count


@pytest.mark.each_value
@pytest.mark.parametrize("kernels", [{}, {"isa": "off"}], ids=["kernels", "torch"])
@pytest.mark.parametrize("layout", ["one tensor per expert", "one tensor for all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_plain_torch(
    family: str, layout: str, kernels: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_mtp_model(family, tmp_path, seed=3)
    seen, reference = Seen(monkeypatch), Reference(tmp_path)
    if layout == "one tensor for all" and family in MIXTURES:
        layer = random_layer(model.config, seed=3)
        add_tensors(tmp_path, {**dict.fromkeys(layer, None), **merged(layer)})
    engine = engine_of(
        tmp_path,
        MTP,
        cache={"enable_prefix_caching": False},
        scheduler={"max_num_batched_tokens": 24},  # prompts come in pieces
        kernels=kernels,
    )
    generate(engine, requests(0.0))
    assert len(seen.drafts) > 100
    for tokens, drafts in list(seen.drafts.items())[::3]:
        assert drafts == reference.drafts(list(tokens), len(drafts)), len(tokens)


def test_a_layer_without_experts_in_a_mixture_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model("qwen3_next", tmp_path)
    dense = save_tiny_model("qwen3_5", tmp_path / "dense")
    add_tensors(tmp_path, dict(random_layer(dense.config)))
    assert model.config.hidden_size == dense.config.hidden_size
    seen = Seen(monkeypatch)
    engine = engine_of(tmp_path, MTP)
    generate(engine, requests(0.0))
    assert not engine.scheduler.drafter_failure
    assert len(seen.drafts) > 100


def test_requests_that_want_no_drafts_are_not_followed(models: dict[str, Path]) -> None:
    engine = engine_of(models["qwen3_5"], MTP)
    params = SamplingParams(temperature=0.0, max_tokens=40, num_speculative_tokens=0)
    assert counts_of(generate(engine, [("r", list(range(1, 30)), params)])).num_draft_tokens == 0


def test_the_layer_sleeps_and_wakes(models: dict[str, Path]) -> None:
    engine = engine_of(models["qwen3_5"], MTP)
    expect_the_same_behind_sleep(engine)
    assert not engine.scheduler.drafter_failure


def weight_bytes(engine: EngineCore) -> int:
    return int(engine.executor.worker_stats()[0].weight_bytes)


def test_its_weights_have_16_bits_as_those_of_the_model(tmp_path: Path) -> None:
    model = save_narrow_model("qwen3_5", tmp_path)
    layer = {name: tensor.bfloat16() for name, tensor in random_layer(model.config).items()}
    add_tensors(tmp_path, dict(layer))
    without = engine_of(tmp_path)
    engine = engine_of(tmp_path, MTP)
    expected = generate(without, requests(0.0)).tokens
    assert generate(engine, requests(0.0)).tokens == expected
    assert not engine.scheduler.drafter_failure
    stored = sum(tensor.nbytes for tensor in layer.values())
    added = weight_bytes(engine) - weight_bytes(without)
    assert stored <= added < 1.5 * stored, "kernels pad rows, and norms have 32 bits"


@pytest.mark.quick("fp8-blocks")
@pytest.mark.parametrize("form", FORMS)
def test_quantized_layers_draft_by_the_weights_that_they_mean(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = tmp_path / "dense"
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    model = save_quantized_model("qwen3_next", form, tmp_path, dense=dense, **sizes)
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in random_layer(model.config).items():
        parts, means = {name: tensor}, tensor
        if is_quantized(name, tensor, form):
            parts, means = FORMATS[form].pack(name, tensor)
        stored |= parts
        meant[name] = means
    assert len(stored) > len(meant)
    stored["mtp.layers.0.self_attn.q_proj.input_scale"] = torch.ones(1)
    add_tensors(tmp_path, dict(stored))
    add_tensors(dense, dict(meant))
    seen, reference = Seen(monkeypatch), Reference(dense)
    generate(engine_of(tmp_path, MTP), requests(0.0))
    assert len(seen.drafts) > 100
    for tokens, drafts in list(seen.drafts.items())[::5]:
        assert drafts == reference.drafts(list(tokens), len(drafts)), len(tokens)


def test_requests_with_adapters_get_their_tokens(tmp_path: Path) -> None:
    model = save_guessable_model("qwen3_5", tmp_path)
    save_adapter(model, tmp_path / "one", r=4, lora_alpha=2, target_modules=["q_proj", "in_proj_qkv", "down_proj"])
    lora = LoraAdapter("one", str(tmp_path / "one"), b"")
    made = [
        EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params)
        for name, prompt, params in requests(0.0)
    ]
    made = [msgspec.structs.replace(each, lora=lora) if i % 2 else each for i, each in enumerate(made)]
    sections = {"lora": {"max_loras": 2}}
    plain = generate(engine_of(tmp_path), requests(0.0)).tokens
    expected = answer(engine_of(tmp_path, **sections), made).tokens
    assert expected != plain, "the adapter says nothing else"
    engine = engine_of(tmp_path, MTP, **sections)
    run = answer(engine, made)
    assert run.tokens == expected
    assert not engine.scheduler.drafter_failure
    assert counts_of(run).num_accepted_tokens > 20


def test_a_checkpoint_with_a_vision_encoder_drafts_for_text(tmp_path: Path) -> None:
    case = Case("qwen3_5", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    add_text_layer(tmp_path, tensors)
    engine = case.engine(speculative=MTP)
    by_request: dict[str, Any] = {}
    made = case.requests()
    run = answer(engine, made)
    assert run.tokens == case.expected
    assert not engine.scheduler.drafter_failure
    assert counts_of(run).num_draft_tokens > 0
    for name in case.prompts:
        before = counts_of(run).num_draft_tokens
        run = answer(engine, case.requests([name]))
        by_request[name] = counts_of(run).num_draft_tokens - before
    assert by_request.pop("text") > 0
    assert set(by_request.values()) == {0}, "drafts are made for text alone"
    engine.shutdown()


def add_text_layer(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add a random MTP layer to a checkpoint whose text model is in ``text_config``."""
    text = json.loads((directory / "config.json").read_text())["text_config"]

    class Config:
        """The sizes of the text model."""

    config = Config()
    config.__dict__.update({key: text[key] for key in text if key != "num_experts"})
    save_file({**tensors, **random_layer(config)}, directory / "model.safetensors", {"format": "pt"})


NO_EXPERTS = "mtp.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("family", "tensors", "message"),
    [
        ("qwen3_5", {"mtp.norm.weight": None}, r"the files have no tensor mtp\.norm\.weight; take them"),
        (
            "qwen3_5",
            {"mtp.fc.weight": torch.zeros(HIDDEN, HIDDEN)},
            r"mtp\.fc\.weight has shape \[48, 48\] in .* requires \[48, 96\]",
        ),
        (
            "qwen3_5",
            {"mtp.embed_tokens.weight": torch.zeros(1)},
            r"the tensor mtp\.embed_tokens\.weight, which the method 'mtp' does not",
        ),
        (
            "qwen3_5",
            {"mtp.layers.1.mlp.up_proj.weight": torch.zeros(1)},
            "have 2 MTP layers; the method 'mtp' supports 1; set speculative.method",
        ),
        ("qwen3_next", {f"{NO_EXPERTS}.2.up_proj.weight": None}, r"no tensor mtp\.layers\.0\.mlp\.experts\.2\.up_proj"),
        ("qwen3_next", {f"{NO_EXPERTS}.3.down_proj.weight": torch.zeros(2, 2)}, r"experts\.\* have different shapes"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    family: str, tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_mtp_model(family, tmp_path)
    add_tensors(tmp_path, tensors)
    with pytest.raises(ModelLoadError, match=rf"speculative.method is 'mtp', and model.path is '.*': .*{message}"):
        engine_of(tmp_path, MTP)


def test_a_checkpoint_without_the_layer_is_refused_with_a_remedy(tmp_path: Path) -> None:
    save_tiny_model("qwen3_5", tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"the files have no tensors mtp\.\*; .* or set speculative.method to another"
    ):
        engine_of(tmp_path, MTP)


def test_other_models_are_refused_by_their_type(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"a llama model; the method .mtp. supports only the model types qwen3_5_moe_text, qwen3_5"
    ):
        engine_of(tmp_path, MTP)


def test_dummy_weights_are_refused(models: dict[str, Path]) -> None:
    with pytest.raises(
        ModelLoadError, match="model.load_format is 'dummy', which reads no MTP layer; set it to 'auto'"
    ):
        engine_of(models["qwen3_5"], MTP, model={"load_format": "dummy"})


def test_a_model_beside_the_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculative.model is 'x', but speculative.method mtp uses a layer of the"):
        engine_of(Path("m"), {**MTP, "model": "x"})


def test_more_drafts_than_a_span_of_the_recurrent_layers_allows_are_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="speculative.num_speculative_tokens is 16, .* set it to at most 15"):
        engine_of(models["qwen3_5"], {**MTP, "num_speculative_tokens": 16})


def test_the_cache_has_room_for_the_layer(models: dict[str, Path]) -> None:
    plain, drafting = engine_of(models["qwen3_5"]), engine_of(models["qwen3_5"], MTP)
    stats = [engine.executor.worker_stats()[0] for engine in (plain, drafting)]
    assert len(drafting.executor.kv_cache_specs()) == len(plain.executor.kv_cache_specs()) + 1
    assert stats[1].weight_bytes > stats[0].weight_bytes
