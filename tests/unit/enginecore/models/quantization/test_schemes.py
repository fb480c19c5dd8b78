"""Dequantized values of packed tensors, compared number by number, and with transformers where possible."""

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock_enginecore.models.quantization import layers as scheme_module
from penstock_enginecore.models.quantization.awq_gptq import Gptq, Packed
from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import Scheme, pieces
from penstock_enginecore.models.quantization.mxfp4 import Mxfp4
from penstock_enginecore.models.quantization.recognition import recognise
from tests.fakes.models.quantized_models import FORMATS, Levels, into_words

LINEAR = [form for form in FORMATS if form != "mxfp4"]


def parts_of(form: str, weight: torch.Tensor) -> tuple[Scheme, dict[str, torch.Tensor], torch.Tensor]:
    """Return the configured scheme, its tensors by suffix, and the dequantized weight."""
    scheme = recognise(FORMATS[form].config)
    tensors, dense = FORMATS[form].pack("x.weight", weight)
    base = "x" if scheme.dense else "x.weight"
    return scheme, {name.removeprefix(base): tensor for name, tensor in tensors.items()}, dense


@pytest.fixture(params=[2**24, 100], ids=["at once", "in pieces"])
def piece_numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheme_module, "_PIECE_NUMBERS", request.param)


@pytest.mark.usefixtures("piece_numbers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", LINEAR)
def test_a_weight_is_what_its_numbers_mean_rounded_once(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    scheme, parts, dense = parts_of(form, torch.randn(40, 80))
    assert scheme.dense_shape({suffix: tuple(part.shape) for suffix, part in parts.items()}) == (40, 80)
    found = scheme.dequantize(parts, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, dense.to(dtype))
    assert (found.float() - dense).norm() < 0.01 * dense.norm()


@pytest.mark.parametrize("form", LINEAR)
def test_parts_that_do_not_fit_are_told_with_their_sizes(form: str) -> None:
    scheme, parts, _ = parts_of(form, torch.randn(40, 80))
    scale = next(suffix for suffix in parts if "scale" in suffix)
    shapes = {suffix: tuple(part.shape) for suffix, part in parts.items()}
    with pytest.raises(ValueError, match=rf"{scale} has shape \[7, 9\]; it must be \["):
        scheme.dense_shape({**shapes, scale: (7, 9)})


@pytest.mark.parametrize("leading", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_floats_are_what_transformers_makes_of_them(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    weight = torch.randn(*leading, 64, 96).to(torch.float8_e4m3fn)
    scales = torch.rand(*leading, 2, 3)
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales, dtype)
    found = Float8((32, 32), "_scale_inv").dequantize({"": weight, "_scale_inv": scales}, dtype)
    assert torch.equal(found, expected)


def test_scales_may_be_powers_of_two_in_a_byte() -> None:
    weight = torch.randn(32, 32).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.25]])
    scheme = Float8((32, 32), "_scale_inv")
    found = scheme.dequantize({"": weight, "_scale_inv": scales.to(torch.float8_e8m0fnu)}, torch.float32)
    assert torch.equal(found, weight.float() * 0.25)


@pytest.mark.usefixtures("piece_numbers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_what_transformers_makes_of_it(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    blocks = torch.randint(0, 256, (3, 20, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 20, 2), dtype=torch.uint8)
    scheme = Mxfp4()
    assert scheme.dense_shape({"_blocks": (3, 20, 2, 16), "_scales": (3, 20, 2)}) == (3, 64, 20)
    found = scheme.dequantize({"_blocks": blocks, "_scales": scales}, dtype)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=dtype))


def test_mxfp4_is_packed_as_it_is_read() -> None:
    torch.manual_seed(8)
    parts, dense = FORMATS["mxfp4"].pack("x", torch.randn(2, 64, 20))
    found = Mxfp4().dequantize({name.removeprefix("x"): part for name, part in parts.items()}, torch.float32)
    assert torch.equal(found, dense)


def test_an_mxfp4_scale_that_is_no_number_is_refused() -> None:
    parts = {"_blocks": torch.zeros(1, 1, 1, 16, dtype=torch.uint8), "_scales": torch.full((1, 1, 1), 255).byte()}
    with pytest.raises(ValueError, match="_scales contains 255, which means NaN"):
        Mxfp4().dequantize(parts, torch.float32)


def test_mxfp4_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"_blocks has shape \[1, 1, 1, 8\]"):
        Mxfp4().dense_shape({"_blocks": (1, 1, 1, 8), "_scales": (1, 1, 1)})


@pytest.mark.parametrize(("scheme", "part"), [(Gptq(4, 32, 1), ".g_idx"), (Packed(4, 32, True), "_g_idx")])
def test_a_group_that_is_not_there_is_refused(scheme: Scheme, part: str) -> None:
    form = "gptq-desc-act" if part == ".g_idx" else "compressed-int4-actorder"
    _, parts, _ = parts_of(form, torch.randn(16, 64))
    parts[part][3] = 2
    with pytest.raises(ValueError, match=f"{part} has group numbers from 0 to 2, but the weights have 2 groups"):
        scheme.dequantize(parts, torch.float32)


def test_groups_of_minus_one_are_groups_in_order() -> None:
    scheme, parts, dense = parts_of("compressed-int4", torch.randn(16, 32))
    found = scheme.dequantize({**parts, "_g_idx": torch.full((32,), -1, dtype=torch.int32)}, torch.float32)
    assert torch.equal(found, dense)


def test_a_shape_other_than_that_of_the_numbers_is_refused() -> None:
    scheme, parts, _ = parts_of("compressed-int4", torch.randn(16, 32))
    with pytest.raises(ValueError, match=r"_shape is \[16, 31\], but _packed has levels of shape \[16, 32\]"):
        scheme.dequantize({**parts, "_shape": torch.tensor([16, 31])}, torch.float32)


def test_the_last_group_may_be_smaller() -> None:
    found = Levels.of(torch.randn(8, 40), group=16)
    parts = {
        ".qweight": into_words(found.levels, 4).t().contiguous(),
        ".qzeros": into_words(found.zeros.T - 1, 4),
        ".scales": torch.from_numpy(found.scales.T.copy()),
    }
    scheme = Gptq(4, 16, 1)
    assert scheme.dense_shape({suffix: tuple(part.shape) for suffix, part in parts.items()}) == (8, 40)
    assert torch.equal(scheme.dequantize(parts, torch.float32), found.dense)


@pytest.mark.parametrize("arguments", [(10, 4), (10, 2**25), (1000, 2**20, 64)])
def test_pieces_cover_all_rows_once(arguments: tuple[int, ...]) -> None:
    rows = [row for piece in pieces(*arguments) for row in range(piece.start, piece.stop)]
    assert rows == list(range(arguments[0]))


def test_floats_of_one_dimension_are_no_weight() -> None:
    with pytest.raises(ValueError, match="rows and columns"):
        Float8("tensor", "_scale").dense_shape({"": (3,), "_scale": ()})
