"""Triton's attention as a candidate for models that run by their modules: when it is offered, and when it is used."""

import dataclasses
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import KVArena
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.build import BuiltForward, ForwardConfig, build_backbone, build_forward
from penstock_enginecore.forward.cuda import attention
from penstock_enginecore.forward.cuda.attention import Attending, attention_candidates
from penstock_enginecore.forward.cuda.decoder import fused_candidates
from penstock_enginecore.forward.modules import ProbedModel
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.pooling.embedder import load_pooling_model
from tests.fakes.models.fused_models import load_probed, save_varied_model
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.models.torch_kernels import TorchKernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


USES = KernelsConfig(isa="off")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret kernels, because a CPU supports them only then."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("olmo2")
    save_tiny_model("olmo2", directory)
    return directory


def build(path: Path, block_size: int = 16) -> BuiltForward:
    model = load_model(ModelConfig(path=str(path)), CPU, lambda line: None)
    return build_forward(model, ForwardConfig(CPU, "triton", USES, num_threads=1, block_size=block_size))


def attending(device: torch.device, specs: dict[str, KVCacheSpec]) -> Attending[None]:
    return Attending(device, specs, torch.bfloat16, lambda backend: None, lambda forward: torch.zeros(0))


SPECS = {"layer": KVCacheSpec(block_size=16, num_kv_heads=1, head_size=16, head_size_v=16, dtype_size=2)}


def test_it_is_offered_where_the_device_is_a_gpu_or_it_is_asked_for() -> None:
    on_gpu, on_cpu = attending(CUDA, SPECS), attending(CPU, SPECS)
    [candidate] = attention_candidates(on_gpu, USES, "auto")
    assert candidate.name == "Triton attention"
    assert attention_candidates(on_gpu, KernelsConfig(attention=False), "auto") == []
    assert attention_candidates(on_gpu, USES, "reference") == []
    assert attention_candidates(on_cpu, USES, "auto") == []
    assert len(attention_candidates(on_cpu, USES, "triton")) == 1
    assert attention_candidates(attending(CUDA, {}), USES, "auto") == []


def test_it_serves_once_it_is_proved(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_kernels", TorchKernels)
    built = build(path)
    assert built.computing == "Triton attention"
    assert isinstance(built.forward.memory, KVArena)


def test_a_cache_that_it_does_not_take_is_left_to_the_reference(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "_kernels", TorchKernels)
    caplog.set_level("INFO")
    built = build(path, block_size=4)
    assert built.computing == "torch"
    assert not isinstance(built.forward.memory, KVArena)
    reason = "model.layers.0.self_attn: its blocks have 4 tokens, but at least 16 are needed"
    assert f"computing with torch; Triton attention not used: {reason}" in caplog.messages


def test_without_triton_the_reference_attends(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "penstock_enginecore.forward.cuda.triton_kernels", None)
    caplog.set_level("INFO")
    assert build(path).computing == "torch"
    assert "Triton attention not used: the attention kernels cannot be compiled: " in caplog.text


class AKeyTooFar(TorchKernels):
    """Reads a wrong key in decode steps only, which a prompt alone would not show."""

    def attend(self, *args: Any) -> None:
        query, keys, values, group, *rest = args
        if len(query) == 1:
            group = dataclasses.replace(group, seq_lens=group.seq_lens - 1)
        super().attend(query, keys, values, group, *rest)


def test_kernels_that_attend_wrongly_are_refuted(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "_kernels", AKeyTooFar)
    assert build(path).computing == "torch"
    assert "Triton attention not used: its results differ by " in caplog.text


def test_models_that_are_pooled_are_offered_it_as_well(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_kernels", TorchKernels)
    model = load_pooling_model(ModelConfig(path=str(path), task="embed"), "embed", CPU, lambda line: None)
    built = build_backbone(model, ForwardConfig(CPU, "triton", USES, num_threads=1, block_size=16))
    assert built.computing == "Triton attention"
    assert isinstance(built.backbone.memory, KVArena)


def test_a_cpu_is_refused_unless_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="'triton' but the device is cpu; use 'auto', 'cpu' or 'reference'"):
        create_backend("triton", CPU)
    create_backend("triton", CUDA)


@pytest.mark.slow
def test_an_engine_on_a_cpu_imports_no_kernels_of_gpus() -> None:
    check = (
        "import sys, penstock_enginecore.executor.loading\n"
        "kernels = 'penstock_enginecore.forward.cuda.kernels.'\n"
        "print([n for n in sys.modules if n.startswith(kernels) and not n.endswith('configurations')])"
    )
    run = subprocess.run([sys.executable, "-c", check], stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout == "[]\n"


# Devices and models for which the fused decoder is available.


@pytest.fixture
def on_a_gpu(tmp_path: Path) -> ProbedModel:
    """Return a model that claims to be on a GPU."""
    save_varied_model("llama", tmp_path)
    return dataclasses.replace(load_probed(tmp_path), device=torch.device("cuda"))


def test_it_is_offered_on_gpus_unless_it_is_turned_off(on_a_gpu: ProbedModel) -> None:
    uses, off = KernelsConfig(), KernelsConfig(decoder=False)
    [candidate] = fused_candidates(on_a_gpu, uses, "auto")
    assert candidate.name == "fused decoder"
    assert fused_candidates(dataclasses.replace(on_a_gpu, device=torch.device("cpu")), uses, "auto") == []
    assert fused_candidates(on_a_gpu, off, "auto") == []
    assert fused_candidates(on_a_gpu, uses, "reference") == []


def test_its_kernels_are_batch_invariant_where_that_is_asked_for(
    on_a_gpu: ProbedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    room = types.ModuleType("triton_kernels")
    room.TritonKernels = TorchKernels  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock_enginecore.forward.cuda.triton_kernels", room)
    monkeypatch.setattr("penstock_enginecore.forward.cuda.decoder.cuda_graphs", lambda: None)
    monkeypatch.setattr("penstock_enginecore.forward.cuda.decoder.FusedForward", lambda *args: made.append(args[1]))
    for asked in (False, True):
        fused_candidates(on_a_gpu, KernelsConfig(batch_invariant=asked), "auto")[0].build()
    assert [kernels.batch_invariant for kernels in made] == [False, True]


def test_without_triton_it_is_not_suitable(on_a_gpu: ProbedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock_enginecore.forward.cuda.triton_kernels", None)
    [candidate] = fused_candidates(on_a_gpu, KernelsConfig(), "auto")
    with pytest.raises(UnsuitableError, match="the decoder's kernels cannot be compiled: "):
        candidate.build()
