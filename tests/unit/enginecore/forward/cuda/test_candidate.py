"""Where the fused decoder is offered."""

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.forward.cuda.decoder import fused_candidates
from penstock_enginecore.forward.modules import ProbedModel
from penstock_enginecore.models.errors import UnsuitableError
from tests.fakes.models.fused_models import load_probed, save_varied_model
from tests.fakes.models.torch_kernels import TorchKernels


@pytest.fixture
def on_a_gpu(tmp_path: Path) -> ProbedModel:
    """A model that says that it is on a GPU."""
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
    with pytest.raises(UnsuitableError, match="its kernels cannot be compiled: "):
        candidate.build()
