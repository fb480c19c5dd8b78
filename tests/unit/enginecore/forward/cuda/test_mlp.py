"""Experts, against the model's own module."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.forward.cuda.buffers import (
    ActivationBuffers,
    HostSlots,
    InputBuffers,
    StepInputs,
    StepShape,
    Widths,
)
from penstock_enginecore.forward.cuda.mlp import mlp_of
from penstock_enginecore.forward.cuda.plans import ExpertsPlan
from penstock_enginecore.forward.cuda.reader import plan_model
from tests.fakes.models.fused_models import CPU, load_probed, save_varied_model
from tests.fakes.models.torch_kernels import TorchKernels

SHAPE = StepShape(16, 16)


def step(num_tokens: int) -> StepInputs:
    """Inputs of a step of ``num_tokens`` tokens, padded."""
    inputs = InputBuffers(SHAPE, 1, 1, HostSlots.on(CPU), CPU).of(SHAPE)
    inputs.groups[0].query_start_loc.fill_(num_tokens)
    return inputs


def experts(architecture: str, path: Path, **changes: Any) -> tuple[ExpertsPlan, torch.nn.Module]:
    save_varied_model(architecture, path, **changes)
    probed = load_probed(path)
    plan = plan_model(probed).layers[1].mlp
    assert isinstance(plan, ExpertsPlan)
    return plan, probed.model.module.model.layers[1].mlp


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("mixtral", {}), ("qwen3_moe", {}), ("qwen3_moe", {"norm_topk_prob": False}), ("gpt_oss", {})],
)
@pytest.mark.parametrize("num_tokens", [1, 11, 16])
@torch.inference_mode()
def test_experts_compute_what_the_module_does_and_padding_takes_none(
    architecture: str, changes: dict[str, Any], num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, module = experts(architecture, tmp_path, **changes)
    x = torch.randn(SHAPE.tokens, 48)
    x[num_tokens:] = torch.nan
    activations = ActivationBuffers(SHAPE, Widths(48, 1, 1, 0, 1), torch.float32, CPU).of(SHAPE)
    out = torch.full_like(x, torch.nan)
    expected = module(x[None, :num_tokens])[0].view(num_tokens, -1)
    ends: list[int] = []
    grouped_mm = torch.nn.functional.grouped_mm

    def counted(rows: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        ends.append(int(offs[-1]))
        return grouped_mm(rows, weight, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    mlp_of(plan, 1.0, TorchKernels()).run(x, step(num_tokens), activations, TorchKernels(), out)
    torch.testing.assert_close(out[:num_tokens], expected)
    assert ends == [num_tokens * plan.top_k] * 2
    mlp_of(plan, 0.5, TorchKernels()).run(x, step(num_tokens), activations, TorchKernels(), out)
    torch.testing.assert_close(out[:num_tokens], 0.5 * expected)
    kernels = TorchKernels(batch_invariant=True)
    mlp_of(plan, 0.5, kernels).run(x, step(num_tokens), activations, kernels, out)
    torch.testing.assert_close(out[:num_tokens], 0.5 * expected)
