"""Adapters on packed linear layers, in models whose other parts the kernels do not know."""

from pathlib import Path

import pytest
import torch

from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.forward.base import ForwardPass
from penstock_enginecore.forward.build import ForwardConfig, build_forward
from penstock_enginecore.forward.modules import ModulesForward
from penstock_enginecore.lora.adapter import AdaptedForward, LowRankUpdate
from penstock_enginecore.native.library import NativeLibrary, open_library
from penstock_enginecore.native.linear import PackedLinear
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.models.adapted_steps import BLOCK_SIZE, step_logits
from tests.fakes.models.tiny_models import save_narrow_model, save_tiny_model
from tests.unit.enginecore.lora.test_native import CPU, load, mixed, reference_logits

FAMILIES = ("cohere", "deepseek_v3", "gpt_neox", "granite", "llama", "opt", "phi", "starcoder2")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def packed(path: Path) -> ForwardPass:
    config = ForwardConfig(CPU, "auto", KernelsConfig(decoder=False), 2, BLOCK_SIZE)
    built = build_forward(load(path), config)
    assert isinstance(built.forward, ModulesForward)
    assert "linear" in built.computing
    return built.forward


@pytest.mark.parametrize("save", [save_tiny_model, save_narrow_model])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_of_every_family_are_those_of_plain_layers(architecture: str, save: object, tmp_path: Path) -> None:
    assert callable(save)
    save(architecture, tmp_path, hidden_size=64, initializer_range=0.2)
    adapters, prompts, _ = mixed(tmp_path)
    forward = packed(tmp_path)
    assert isinstance(forward, AdaptedForward)
    plain = step_logits(forward, [prompt.plain for prompt in prompts])
    for adapter in adapters:
        forward.add_adapter(adapter)
    expected = reference_logits(tmp_path, prompts, adapters)
    for prompt, without, wanted, got in zip(prompts, plain, expected, step_logits(forward, prompts), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(got, without) == (prompt.digest is None)


@pytest.fixture(scope="module", params=runnable())
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return open_library(request.param, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "k", "rank"), [(1, 1, 1), (5, 3, 2), (33, 40, 3), (130, 65, 16), (64, 129, 21), (256, 1024, 64)]
)
def test_what_is_added_is_torchs_and_a_rows_bits_are_its_own(
    library: NativeLibrary, n: int, k: int, rank: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(n)
    a, b = (torch.randn(shape, generator=generator).to(dtype).float() for shape in ((rank, k), (n, rank)))
    layer = PackedLinear(library, torch.nn.Linear(k, n))
    addition = layer.addition(LowRankUpdate(a, b))
    x, out = torch.randn(70, k, generator=generator), torch.randn(70, n, generator=generator)
    out[3, 0] = -0.0
    whole = out.clone()
    addition(x, whole)
    exact = out.double() + x.double() @ a.double().T @ b.double().T
    torch.testing.assert_close(whole, exact.float(), rtol=1e-5, atol=1e-5 * (k * rank) ** 0.5)
    for first, end in ((0, 1), (1, 3), (2, 7), (5, 20), (33, 66), (69, 70)):
        some = out.clone()
        addition(x[first:end], some[first:end])
        assert torch.equal(some[first:end], whole[first:end])
        assert torch.equal(some[:first].view(torch.int32), out[:first].view(torch.int32))
        assert torch.equal(some[end:].view(torch.int32), out[end:].view(torch.int32))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_nan_stays_in_its_row(library: NativeLibrary, value: float) -> None:
    addition = PackedLinear(library, torch.nn.Linear(33, 20)).addition(
        LowRankUpdate(torch.ones(3, 33), torch.ones(20, 3))
    )
    x, out = torch.ones(5, 33), torch.zeros(5, 20)
    x[2, 32] = value
    addition(x, out)
    assert not out[2].isfinite().any()
    assert torch.equal(out[[0, 1, 3, 4]], torch.full((4, 20), 99.0))
