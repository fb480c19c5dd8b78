"""Products of inputs in bfloat16 parts on matrix units: emulated everywhere, and real where the processor has one."""

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.native import library as library_module
from penstock_enginecore.native.backend import NativeBackend
from penstock_enginecore.native.experts import PackedExperts
from penstock_enginecore.native.library import KernelsError, NativeLibrary, open_library
from penstock_enginecore.native.weights import PackedWeight, multiply
from tests.emulation.build import emulated, pretend
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.engines.rounding import ROUNDING, open_rounding

KINDS = ["emulated", *({"amx"} & set(runnable()))]


@pytest.fixture(scope="module", params=KINDS)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "emulated":
            pretend(monkeypatch, "amx")
        return open_library("amx", 2)


@pytest.fixture(scope="module", params=ROUNDING, ids=" ".join)
def rounding(request: pytest.FixtureRequest) -> NativeLibrary:
    """Kernels that may round inputs."""
    return open_rounding(*request.param)


def half(*shape: int) -> torch.Tensor:
    """Random numbers that bfloat16 holds."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().float()


def test_three_parts_hold_a_float_whole(library: NativeLibrary) -> None:
    """The product is the number times one, and the other weights are zero."""
    bits = torch.randint(0, 2**32, (40, 70), generator=torch.Generator().manual_seed(0)) - 2**31
    x = bits.to(torch.int32).view(torch.float32)
    kept = x.isfinite() & (x.abs() >= 2.0**-103)
    x = torch.where(kept, x, torch.ones(()))
    weight = PackedWeight(library, torch.cat([torch.eye(70), half(1, 70)]))  # not all of it are integers
    assert weight.dtype == torch.bfloat16
    assert library.parts == 3
    assert torch.equal(multiply(library, weight, x)[:, :70], x)
    largest = torch.full((1, 70), torch.finfo(torch.float32).max)
    assert torch.equal(multiply(library, weight, largest)[:, :70], largest)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_nan_and_infinity_are_kept_in_their_row(library: NativeLibrary, value: float) -> None:
    x = torch.randn(3, 40)
    x[1, 17] = value
    if value != value:
        x.view(torch.int32)[1, 17] = 0x7F800001  # a NaN whose low bits a conversion to bfloat16 would cut off
    weight = half(9, 40).abs() + 1
    out = multiply(library, PackedWeight(library, weight), x)
    torch.testing.assert_close(out, F.linear(x, weight), equal_nan=True, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("n", "k"), [(1, 5), (33, 31), (64, 33), (70, 130), (66, 512)])
def test_a_product_is_torchs_and_a_rows_bits_are_its_own(library: NativeLibrary, n: int, k: int) -> None:
    weight, bias, x = half(n, k), torch.randn(n), torch.randn(97, k)
    packed = PackedWeight(library, weight, bias)
    assert packed.dtype == torch.bfloat16
    whole = multiply(library, packed, x)
    exact = F.linear(x.double(), weight.double(), bias.double()).float()
    torch.testing.assert_close(whole, exact, rtol=1e-5, atol=1e-5 * k**0.5)
    for rows in (1, 2, 12, 13, 15, 16, 17, 31, 32, 33, 70):
        for start in (0, 97 - rows):
            beside = slice(start, start + rows)
            assert torch.equal(multiply(library, packed, x[beside]), whole[beside])


def test_inputs_that_may_be_rounded_are_multiplied_as_one_part(rounding: NativeLibrary) -> None:
    weight, x = half(70, 131), torch.randn(70, 131)
    x[3, 5], x[4, 6], x[5, 7] = torch.inf, torch.nan, torch.finfo(torch.float32).max
    packed = PackedWeight(rounding, weight)
    assert rounding.parts == 1
    whole = multiply(rounding, packed, x)
    exact = F.linear(x.bfloat16().double(), weight.double()).float()
    torch.testing.assert_close(whole, exact, rtol=1e-5, atol=1e-4, equal_nan=True)
    for start, end in ((0, 1), (60, 61), (7, 23), (7, 24), (20, 70)):
        assert torch.equal(multiply(rounding, packed, x[start:end]), whole[start:end])
    assert NativeBackend(rounding, KernelsConfig()).describe() == (
        f"{rounding.isa} kernels (unused), 2 threads, inputs rounded to bfloat16"
    )


@pytest.mark.skipif("avx512_bf16" not in runnable(), reason="this processor has no AVX512-BF16")
def test_the_emulated_instruction_gives_the_bits_of_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers include subnormal and infinite ones and NaN."""
    real = open_library("avx512_bf16", 2, rounded=True)
    with monkeypatch.context() as patched:
        pretend(patched, "avx512_bf16")
        emulation = open_library("avx512_bf16", 2, rounded=True)
    bits = torch.randint(0, 2**32, (40, 70), generator=torch.Generator().manual_seed(0)) - 2**31
    x, weight = torch.cat([bits.to(torch.int32).view(torch.float32), torch.randn(40, 70)]), half(33, 70)
    got, wanted = (multiply(each, PackedWeight(each, weight), x) for each in (real, emulation))
    assert got[40:].isfinite().all()
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_pairs_of_weights_are_multiplied_with_floats_unless_inputs_may_be_rounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, "avx512_bf16")
    library = open_library("avx512_bf16", 1)
    assert library.parts == 0
    weight, x = half(70, 131), torch.randn(70, 131)
    packed = PackedWeight(library, weight)
    assert packed.layout == "torch.bfloat16 by 2"
    whole = multiply(library, packed, x)
    torch.testing.assert_close(whole, F.linear(x.double(), weight.double()).float(), rtol=1e-5, atol=1e-4)
    for start, end in ((0, 1), (7, 12), (20, 70)):
        assert torch.equal(multiply(library, packed, x[start:end]), whole[start:end])
    (tmp_path / "kernels_avx512_bf16.so").symlink_to(emulated("avx512_bf16") / "kernels_avx512_bf16.so")
    (tmp_path / "kernels_baseline.so").symlink_to(BUILT / "kernels_baseline.so")
    monkeypatch.setattr(library_module, "_DIRECTORY", tmp_path)
    assert [open_library("auto", 1, rounded=rounded).isa for rounded in (False, True)] == ["baseline", "avx512_bf16"]


def test_sums_are_nearer_to_exact_ones_than_those_of_floats(library: NativeLibrary) -> None:
    """The unit rounds a sum once for sixteen pairs."""
    weight, x = half(64, 4096), torch.randn(20, 4096)
    exact = F.linear(x.double(), weight.double())
    [parts, floats] = [
        float((multiply(each, PackedWeight(each, weight), x) - exact).square().mean().sqrt())
        for each in (library, open_library_beside("baseline"))
    ]
    assert parts < floats


def open_library_beside(isa: str) -> NativeLibrary:
    """Open one of the libraries that are built, although another instruction set is emulated."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(library_module, "_DIRECTORY", BUILT)
        return open_library(isa, 1)


BUILT = library_module._DIRECTORY


def test_weights_of_other_kinds_are_multiplied_with_floats(library: NativeLibrary) -> None:
    weight, x = torch.randn(33, 50), torch.randn(40, 50)
    packed = PackedWeight(library, weight)
    assert packed.dtype == torch.float32
    torch.testing.assert_close(multiply(library, packed, x), F.linear(x, weight), rtol=1e-5, atol=1e-4)


def test_panels_end_in_zeros_up_to_whole_blocks(library: NativeLibrary) -> None:
    assert PackedWeight(library, half(1, 33)).num_bytes == 2 * 32 * 64
    assert PackedWeight(library, half(33, 32)).num_bytes == 2 * 64 * 32


def test_experts_tell_a_layout_of_their_own_and_multiply_by_it(library: NativeLibrary) -> None:
    experts = MixtralExperts(MixtralConfig(hidden_size=40, num_local_experts=4, intermediate_size=64))
    experts.config._experts_implementation = "eager"
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(half(*parameter.shape) / 4)
    packed = PackedExperts(library, experts)
    assert packed.layout == "torch.bfloat16 by 32, torch.bfloat16 by 32, 16 lanes, gated"
    x = torch.randn(70, 40)
    chosen = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:2] for i in range(70)])
    weights = torch.rand(70, 2)
    with torch.no_grad():
        whole = packed(x, chosen, weights)
        torch.testing.assert_close(whole, experts(x, chosen, weights), rtol=1e-4, atol=1e-5)
    for rows in (slice(0, 1), slice(3, 20), slice(69, 70)):
        assert torch.equal(packed(x[rows], chosen[rows], weights[rows]), whole[rows])


def test_what_computes_says_how(library: NativeLibrary) -> None:
    said = NativeBackend(library, KernelsConfig()).describe("decoder")
    assert said == "amx kernels (decoder), 2 threads, inputs in 3 bfloat16 parts"


def refuse() -> None:
    raise OSError(95, "Operation not supported")


def test_without_leave_of_the_system_the_next_instruction_set_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "kernels_baseline.so").symlink_to(BUILT / "kernels_baseline.so")
    (tmp_path / "kernels_amx.so").symlink_to(emulated("amx") / "kernels_amx.so")
    pretend(monkeypatch, "amx")
    monkeypatch.setattr(library_module, "_DIRECTORY", tmp_path)
    assert open_library("auto", 1).isa == "amx"
    monkeypatch.setitem(library_module._PERMISSIONS, "amx", refuse)
    with caplog.at_level(logging.WARNING):
        assert open_library("auto", 1).isa == "baseline"
    assert "the operating system does not let this process use amx, so other kernels are tried reason=" in caplog.text
    with pytest.raises(
        KernelsError,
        match=r"kernels.isa is 'amx', but the operating system does not let this process use it: .*not supported",
    ):
        open_library("amx", 1)


@pytest.mark.skipif("amx" in runnable(), reason="the processor has tiles")
def test_a_system_without_tiles_refuses_them() -> None:
    with pytest.raises(OSError, match="Invalid argument|not supported|not implemented"):
        library_module.request_tiles()
