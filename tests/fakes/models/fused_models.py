"""Fused decoders of tiny checkpoints on a CPU, and engines that are offered one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.graphs import StepGraphs
from penstock_enginecore.forward.cuda.linear import keeps
from penstock_enginecore.forward.dummy_inputs import Probe, probe_logits
from penstock_enginecore.forward.equivalence_check import Candidate, Proven, first_proven
from penstock_enginecore.forward.modules import ModulesForward, ProbedModel, probe_model
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.models.loader import Keeps, keep_none, load_model
from tests.fakes.models.recorded_launches import RecordedGraph, RecordedKernels
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.models.torch_kernels import TorchKernels

CPU = torch.device("cpu")
FUSED_FAMILIES = (
    "llama",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "granite",
    "seed_oss",
    "deepseek_v3",
    "dots1",
    "vaultgemma",
)


def save_varied_model(architecture: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint like ``save_tiny_model``, but with varied norms and experts.

    All weights of all norms differ, and the corrections of the experts' scores are not zero.
    """
    model = save_tiny_model(architecture, directory, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.5)
    model.save_pretrained(directory)
    return model


def load_probed(path: Path, keep: Keeps = keep_none) -> ProbedModel:
    """Load the checkpoint at ``path``, and the results of probing it with a token."""
    return probe_model(load_model(ModelConfig(path=str(path)), CPU, lambda line: None, keep), CPU, 16)


@torch.inference_mode()
def prove(probed: ProbedModel, build: Callable[[], FusedForward]) -> Proven[FusedForward]:
    """Check the candidate that ``build`` creates, and return the outcome."""
    modules = ModulesForward(probed, create_backend("reference", CPU))
    probe = Probe.prompt(probed.model.vocab_size)
    return first_proven([Candidate("fused decoder", build)], lambda: probe_logits(modules, probe))


def fused(path: Path, kernels: TorchKernels | None = None) -> FusedForward:
    """Return the fused decoder of the checkpoint at ``path``, after its activation."""
    probed = load_probed(path)
    proven = prove(probed, lambda: FusedForward(probed, kernels or TorchKernels()))
    assert proven.serves is not None, proven.reasons
    return proven.serves


def offer_fused(monkeypatch: pytest.MonkeyPatch, lora: SlotLimits | None = None) -> None:
    """Make engines of this test try the fused decoder instead of the CPU's, and replay steps if possible. ``lora`` adds
    adapter slots.
    """

    def build(probed: ProbedModel) -> FusedForward:
        kernels = RecordedKernels()
        graphs = StepGraphs(lambda: RecordedGraph(kernels, of_modules=lora is not None))
        return FusedForward(probed, kernels, graphs, lora)

    monkeypatch.setattr("penstock_enginecore.executor.loading.kept_weights", lambda *_: keeps)
    monkeypatch.setattr(
        "penstock_enginecore.forward.build.decoder_candidate",
        lambda library, probed, *others, **settings: Candidate("fused decoder", lambda: build(probed)),
    )
