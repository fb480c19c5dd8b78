"""An fp8 KV cache gives the results of transformers with a cache rounded to 8 bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from penstock_common.errors import ConfigError
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import FLOAT8, KVScales, num_bytes
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.forward.cuda import attention
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.dummy_inputs import Probe, probe_logits
from penstock_enginecore.forward.equivalence_check import distance
from penstock_enginecore.forward.modules import ModulesForward, ProbedModel, probe_model
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import load_model
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.models.fused_models import CPU, prove
from tests.fakes.models.quantized_models import save_quantized_model
from tests.fakes.models.rounded_cache import RoundedCache, Scales
from tests.fakes.models.torch_kernels import TorchKernels

SCALES: Scales = [(2.0**-12, 2.0**-11), (2.0**-11, 2.0**-12)]
"""Powers of two, which divide and multiply exactly, so small that large numbers end at the largest of e4m3."""
SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}


def save_scaled(directory: Path, scales: Scales = SCALES, layer: str = "model.layers.{}.self_attn") -> PreTrainedModel:
    """Save an fp8 checkpoint with scales of its KV cache. Returns the dequantized weights."""
    model = save_quantized_model("llama", "compressed-fp8-tensor", directory)
    tensors = load_file(directory / "model.safetensors")
    for i, (key, value) in enumerate(scales):
        tensors[f"{layer.format(i)}.k_scale"] = torch.tensor([key], dtype=torch.bfloat16)
        tensors[f"{layer.format(i)}.v_scale"] = torch.tensor(value)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = SCHEME
    (directory / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("float8") / "checkpoint"
    return path, save_scaled(path)


def probed(path: Path, dtype: torch.dtype | None = FLOAT8) -> ProbedModel:
    return probe_model(load_model(ModelConfig(path=str(path)), CPU, lambda line: None), CPU, 16, dtype)


@torch.inference_mode()
def by_modules(model: ProbedModel) -> torch.Tensor:
    return probe_logits(ModulesForward(model, create_backend("reference", CPU)), Probe.prompt(320))


@torch.inference_mode()
def by_transformers(model: PreTrainedModel, scales: Scales) -> torch.Tensor:
    ids = torch.from_numpy(Probe.prompt(320).token_ids)[None]
    return model(input_ids=ids, past_key_values=RoundedCache(scales), use_cache=True).logits[0]


def test_logits_are_those_on_a_rounded_cache(model: tuple[Path, PreTrainedModel]) -> None:
    path, dense = model
    found = by_modules(probed(path))
    assert distance(found, by_transformers(dense, SCALES)) < 1e-5
    unscaled, exact = by_transformers(dense, [(1.0, 1.0)] * 2), by_modules(probed(path, None))
    assert distance(found, unscaled) > 1e-3
    assert distance(found, exact) > 1e-3


def test_a_checkpoint_without_scales_has_ones(tmp_path: Path) -> None:
    dense = save_quantized_model("llama", "compressed-fp8-tensor", tmp_path)
    assert distance(by_modules(probed(tmp_path)), by_transformers(dense, [(1.0, 1.0)] * 2)) < 1e-5


class WithoutValueScales(TorchKernels):
    """Computes attention as if values had not been divided by their scale."""

    def attend(self, *args: Any) -> None:
        *rest, scales = args
        super().attend(*rest, KVScales(scales.key, 1.0))


@pytest.mark.slow
def test_the_fused_decoder_keeps_it_and_is_proved_on_it(model: tuple[Path, PreTrainedModel]) -> None:
    path, _ = model
    proven = prove(probed(path), lambda: FusedForward(probed(path), TorchKernels()))
    assert proven.serves is not None, proven.reasons
    whole, small = (
        one.memory.throwaway(16, 3) for one in (FusedForward(probed(path, None), TorchKernels()), proven.serves)
    )
    assert num_bytes(whole) == 4 * num_bytes(small)
    assert {name: layer.cache.scales for name, layer in small.items()} == {
        f"model.layers.{i}.self_attn": KVScales(*scales) for i, scales in enumerate(SCALES)
    }
    assert prove(probed(path), lambda: FusedForward(probed(path), WithoutValueScales())).refuted


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_tokens_are_those_on_a_rounded_cache(
    backend: str, model: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, dense = model
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(attention, "_kernels", TorchKernels)
    engine = build_engine(
        path,
        model={"attention_backend": backend},
        cache={"block_size": 16, "dtype": "fp8"},
        kernels={"isa": "off"},
        scheduler={"max_num_batched_tokens": 11},
    )
    [info] = engine.executor.collective_rpc("worker_info")
    assert info["computing"] == ("torch" if backend == "reference" else "Triton attention")
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(1, 320, (n,), generator=generator).tolist() for n in (1, 7, 34)]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    run = generate(engine, [(str(i), prompt, params) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "past_key_values": RoundedCache(SCALES)}
        expected = dense.generate(ids, **given, max_new_tokens=8, do_sample=False)
        assert run.tokens[str(i)] == expected[0, len(prompt) :].tolist()


def test_scales_of_a_layer_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    save_scaled(tmp_path, layer="model.layers.{}.mixer")
    with pytest.raises(
        ModelLoadError, match=r"has scales for model\.layers\.0\.mixer, which is not an attention layer"
    ):
        probed(tmp_path)
    assert probed(tmp_path, None).cache_scales == {}


def test_the_kernels_for_cpus_do_not_keep_it(model: tuple[Path, PreTrainedModel]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"cache\.dtype is 'fp8', which the kernels for CPUs do not support; set cache\.dtype to 'auto', or",
    ):
        build_engine(model[0], cache={"dtype": "fp8"})
