"""Products of the fused decoder with weights that stay quantized."""

from pathlib import Path

import pytest
import torch

from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.linear import MANY_ROWS, QuantizedProduct, empty, keeps, merged
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.quantization.awq_gptq import Awq, Gptq, Packed
from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import QuantizedLinear, Scheme
from penstock_enginecore.models.quantization.mxfp4 import Mxfp4
from penstock_enginecore.models.quantization.recognition import recognise
from tests.fakes.models.fused_models import load_probed, prove
from tests.fakes.models.quantized_models import FORMATS, save_quantized_model
from tests.fakes.models.torch_kernels import TorchKernels

NOT_KEPT = ("gptq-desc-act", "gptq-8-bits", "compressed-int4-actorder", "compressed-int8")
KEPT = [form for form in FORMATS if form not in (*NOT_KEPT, "mxfp4")]
COLUMNS = 64


def layers(form: str, *, bias: bool = False, sizes: tuple[int, ...] = (40, 24, 32)) -> list[QuantizedLinear]:
    torch.manual_seed(0)
    scheme, found = recognise(FORMATS[form].config), []
    for size in sizes:
        linear = torch.nn.Linear(COLUMNS, size, bias=bias)
        parts, _ = FORMATS[form].pack("x.weight", linear.weight.detach())
        base = "x" if scheme.dense else "x.weight"
        found.append(QuantizedLinear(linear, scheme, {name.removeprefix(base): part for name, part in parts.items()}))
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", KEPT)
@torch.inference_mode()
def test_a_product_is_those_of_the_layers_one_after_the_other(form: str, bias: bool) -> None:
    linears, x = layers(form, bias=bias), torch.randn(5, COLUMNS)
    expected = torch.cat([linear(x) for linear in linears], dim=1)
    product, out = merged(linears, TorchKernels()), torch.full((5, 96), torch.nan)
    assert isinstance(product, QuantizedProduct)
    assert (product.in_features, product.out_features) == (COLUMNS, 96)
    product.affine(x, out)
    torch.testing.assert_close(out, expected)
    product.affine(x, out, 0.3)
    torch.testing.assert_close(out, expected * 0.3)
    product.product(x, out)
    torch.testing.assert_close(out, expected - (product.bias if product.bias is not None else 0))
    product.to(torch.device("cpu"))
    assert torch.equal(torch.cat([linear(x) for linear in linears], dim=1), expected)


@pytest.mark.parametrize("form", ["fp8-blocks", "awq"])
@torch.inference_mode()
def test_products_of_many_rows_use_a_dense_weight(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linears, kernels = layers(form, bias=True), TorchKernels()
    product = merged(linears, kernels)
    shapes: list[torch.Size] = []
    dequantize = kernels.dequantize
    monkeypatch.setattr(kernels, "dequantize", lambda weight, out: (shapes.append(out.shape), dequantize(weight, out)))
    for dtype, rows, invariant in (
        (torch.bfloat16, MANY_ROWS - 1, False),
        (torch.bfloat16, MANY_ROWS, False),
        (torch.float32, MANY_ROWS, False),
        (torch.bfloat16, MANY_ROWS, True),
    ):
        kernels.batch_invariant = invariant
        assert product.bias is not None
        product.bias.data = product.bias.data.to(dtype)
        x, out = torch.randn(rows, COLUMNS).to(dtype), torch.empty(2, rows, 96, dtype=dtype)
        expected = torch.cat([linear.scheme.dequantize(linear.tensors, torch.float32) for linear in linears])
        product.affine(x, out[0], 0.5)
        product.product(x, out[1])
        plain = x.float() @ expected.t()
        tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(out[1].float(), plain, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(out[0].float(), (plain + product.bias.float()) / 2, rtol=tolerance, atol=tolerance)
    assert shapes == [torch.Size([96, COLUMNS])] * 2


@torch.inference_mode()
def test_numbers_are_held_once_and_emptied_layers_keep_their_sizes() -> None:
    linears = layers("fbgemm", bias=True)
    product = merged(linears, TorchKernels())
    assert len({linear.tensors[""].untyped_storage().data_ptr() for linear in linears}) == 1
    assert product.num_bytes == 96 * COLUMNS + 4 * 96 + 4 * 96  # numbers, scales, biases
    for linear in linears:
        empty(linear)
    assert [(linear.in_features, linear.out_features) for linear in linears] == [
        (COLUMNS, 40),
        (COLUMNS, 24),
        (COLUMNS, 32),
    ]
    assert sum(parameter.numel() for linear in linears for parameter in linear.parameters()) == 0


@torch.inference_mode()
def test_one_layer_is_its_own_product() -> None:
    [linear] = layers("fp8-blocks", sizes=(40,))
    before = linear.tensors[""].data_ptr()
    merged([linear], TorchKernels())
    assert linear.tensors[""].data_ptr() == before


def test_layers_of_which_some_are_quantized_are_refused() -> None:
    with pytest.raises(
        UnsuitableError, match="only some of the linear layers that one matrix product computes are quantized"
    ):
        merged([*layers("fbgemm"), torch.nn.Linear(COLUMNS, 8, bias=False)], TorchKernels())


@pytest.mark.parametrize(
    ("forms", "named"),
    [(("fbgemm", "fp8-tensor"), "fp8 by row, fp8 by tensor"), (("gptq-8-bits",), "GPTQ, 8 bits, groups of 32")],
)
def test_weights_that_no_product_takes_are_refused(forms: tuple[str, ...], named: str) -> None:
    with pytest.raises(UnsuitableError, match=f"quantized weights of type {named} are not supported"):
        merged([linear for form in forms for linear in layers(form)], TorchKernels())


@pytest.mark.parametrize(
    ("scheme", "kept"),
    [
        (Float8("row", "_scale"), True),
        (Float8((1, 128), "_scale_inv"), True),
        (Float8((128, 48), "_scale_inv"), False),
        (Float8((8, 8), "_scale_inv"), False),
        (Awq(128), True),
        (Awq(96), True),
        (Awq(16), True),
        (Awq(8), False),
        (Awq(-1), True),
        (Gptq(4, 128, 1), True),
        (Gptq(4, 128, 1, act_order=True), False),
        (Gptq(8, 128, 1), False),
        (Packed(4, 32, True), True),
        (Packed(4, 32, True, act_order=True), False),
        (Mxfp4(), True),
    ],
)
def test_what_layers_keep(scheme: Scheme, kept: bool) -> None:
    assert keeps(scheme) == kept


def test_columns_in_another_order_than_the_configuration_says_are_refused() -> None:
    linears = layers("gptq", sizes=(16,))
    linears[0].replace(".g_idx", linears[0].tensors[".g_idx"].flip(0))
    with pytest.raises(UnsuitableError, match="GPTQ, 4 bits, groups of 32 weights with .* reordered columns"):
        merged(linears, TorchKernels())


@pytest.mark.parametrize("form", ["fp8-blocks", "fbgemm"])
def test_the_decoder_is_proved_with_kept_weights_and_holds_them_alone(form: str, tmp_path: Path) -> None:
    save_quantized_model("llama", form, tmp_path, hidden_size=64)
    probed = load_probed(tmp_path, keeps)
    linears = {name for name, module in probed.model.module.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(linears) == 2 * 7
    proven = prove(probed, lambda: FusedForward(probed, TorchKernels()))
    assert proven.serves is not None, proven.reasons
    scales = 4 if form == "fbgemm" else 8  # of a row in float32, of which blocks have 2 of 32 columns
    rows, columns = 64 + 2 * 32 + 64 + 3 * 64, 64
    plain = 4 * (2 * 320 * 64 + 5 * 64)  # embedding, head, norms
    assert proven.serves.weight_bytes == plain + 2 * rows * (columns + scales)
