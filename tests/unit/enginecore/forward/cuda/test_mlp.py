"""Experts, against the model's own module."""

from pathlib import Path
from types import SimpleNamespace
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
from penstock_enginecore.forward.cuda.decoder import FusedForward, fused_plan
from penstock_enginecore.forward.cuda.kernel_api import ExpertRows
from penstock_enginecore.forward.cuda.linear import empty, keeps
from penstock_enginecore.forward.cuda.mlp import (
    DenseGroups,
    GroupedProduct,
    QuantizedGroups,
    grouped,
    mlp_of,
    torch_is_fast,
)
from penstock_enginecore.models.decoder_plan import ExpertsPlan
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.quantization.layers import QuantizedExperts, QuantizedStack
from penstock_enginecore.models.quantization.recognition import recognise
from tests.fakes.models.fused_models import CPU, load_probed, prove, save_varied_model
from tests.fakes.models.quantized_models import FORMATS, save_quantized_model
from tests.fakes.models.torch_kernels import TorchKernels

SHAPE = StepShape(16, 16)


def step(num_tokens: int) -> StepInputs:
    """Return padded inputs of a step with ``num_tokens`` tokens."""
    inputs = InputBuffers(SHAPE, 1, 1, HostSlots.on(CPU), CPU).of(SHAPE)
    inputs.groups[0].query_start_loc.fill_(num_tokens)
    return inputs


def experts(architecture: str, path: Path, **changes: Any) -> tuple[ExpertsPlan, torch.nn.Module]:
    save_varied_model(architecture, path, **changes)
    probed = load_probed(path)
    plan = fused_plan(probed).layers[1].mlp
    assert isinstance(plan, ExpertsPlan)
    return plan, probed.model.module.model.layers[1].mlp


class Counting(TorchKernels):
    """Kernels that note how many rows each grouped product has."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[int] = []

    def grouped_product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ends: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> None:
        self.ends.append(int(ends[-1]))
        super().grouped_product(x, weight, bias, ends, *rest, **options)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("mixtral", {}), ("qwen3_moe", {}), ("qwen3_moe", {"norm_topk_prob": False}), ("gpt_oss", {})],
)
@pytest.mark.parametrize("num_tokens", [1, 11, 16])
@torch.inference_mode()
def test_experts_compute_what_the_module_does_and_padding_takes_none(
    architecture: str, changes: dict[str, Any], num_tokens: int, tmp_path: Path
) -> None:
    plan, module = experts(architecture, tmp_path, **changes)
    x = torch.randn(SHAPE.tokens, 48)
    x[num_tokens:] = torch.nan
    activations = ActivationBuffers(SHAPE, Widths(48, 1, 1, 0, 1), torch.float32, CPU).of(SHAPE)
    out = torch.full_like(x, torch.nan)
    expected = module(x[None, :num_tokens])[0].view(num_tokens, -1)
    near: Any = {"rtol": 2e-6, "atol": 1e-6 * float(expected.abs().max())}  # the module adds in float32
    counting = Counting()
    mlp_of(plan, 1.0, counting).run(x, step(num_tokens), activations, counting, out)
    torch.testing.assert_close(out[:num_tokens], expected, **near)
    assert counting.ends == [num_tokens * plan.top_k] * 2
    mlp_of(plan, 0.5, TorchKernels()).run(x, step(num_tokens), activations, TorchKernels(), out)
    torch.testing.assert_close(out[:num_tokens], 0.5 * expected, **near)
    kernels = TorchKernels(batch_invariant=True)
    mlp_of(plan, 0.5, kernels).run(x, step(num_tokens), activations, kernels, out)
    torch.testing.assert_close(out[:num_tokens], 0.5 * expected, **near)


# Torch's grouped product, which is fast only for some numbers and GPUs. Elsewhere it reads the ends of rows on the host.


def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Fail like torch's grouped product during the capture of a graph, on a GPU on which it is not one kernel."""
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_products_do_not_need_torch_where_its_product_cannot_be_captured(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", refuse)
    weight, rows = torch.randn(3, 8, 16).to(dtype), torch.randn(400, 16).to(dtype)
    ends = torch.tensor([100, 100, 400], dtype=torch.int32)
    found = scattered(DenseGroups(weight, None, TorchKernels(), transposed=False), rows, ends)
    expected = torch.cat([rows[:100] @ weight[0].t(), rows[100:] @ weight[2].t()])
    torch.testing.assert_close(found, expected)


@torch.inference_mode()
def test_torch_computes_large_steps_where_its_product_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, top_k = torch.randn(3, 48, 16), torch.randn(100, 16), 2
    down = torch.randn(3, 16, 24)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0)).int()
    rows = ExpertRows(torch.tensor([90, 90, 200], dtype=torch.int32), order, top_k)

    def computed() -> torch.Tensor:
        gated, out = torch.empty(200, 24), torch.empty(200, 16)
        DenseGroups(weight, None, TorchKernels(), transposed=False).gather(x, rows, "silu", gated)
        DenseGroups(down, None, TorchKernels(), transposed=False).scatter(gated, rows, out)
        return out

    expected, calls, grouped_mm = computed(), [], torch.nn.functional.grouped_mm

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(options["offs"].tolist())
        return grouped_mm(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    monkeypatch.setattr("penstock_enginecore.forward.cuda.mlp.torch_is_fast", lambda weight: True)
    torch.testing.assert_close(computed(), expected, rtol=1e-4, atol=1e-4)
    assert calls == [[90, 90, 200]] * 2


@pytest.mark.parametrize(
    ("dtype", "capability", "shape", "fast"),
    [
        (torch.bfloat16, (9, 0), (3, 64, 128), True),
        (torch.bfloat16, (10, 0), (3, 64, 128), True),
        (torch.bfloat16, (8, 9), (3, 64, 128), False),
        (torch.bfloat16, (12, 0), (3, 64, 128), False),
        (torch.float16, (9, 0), (3, 64, 128), False),
        (torch.float32, (9, 0), (3, 64, 128), False),
        (torch.bfloat16, (9, 0), (3, 60, 128), False),
    ],
)
def test_the_fast_product_of_torch_needs_a_dtype_and_a_gpu(
    dtype: torch.dtype, capability: Any, shape: Any, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    weight: Any = SimpleNamespace(device=torch.device("cuda:0"), dtype=dtype, shape=shape)
    assert torch_is_fast(weight) is fast
    assert not torch_is_fast(torch.empty(shape, dtype=dtype))


# Expert products whose weights stay quantized in memory.

EXPERTS, COLUMNS = 3, 64
NOT_KEPT = ("gptq-desc-act", "gptq-8-bits", "compressed-int4-actorder", "compressed-int8")
KEPT = [form for form in FORMATS if form not in NOT_KEPT]


def stack(form: str, sizes: tuple[int, ...] = (40, 24), columns: int = COLUMNS) -> QuantizedStack:
    """Return experts with matrices of ``sizes`` rows. MXFP4 has one matrix of the total size instead."""
    torch.manual_seed(0)
    scheme = recognise(FORMATS[form].config)
    if form == "mxfp4":
        parts, _ = FORMATS[form].pack("x", torch.randn(EXPERTS, columns, sum(sizes)))
        return QuantizedStack(scheme, [{name.removeprefix("x"): part for name, part in parts.items()}], merged=True)
    base, projections = ("x" if scheme.dense else "x.weight"), []
    for size in sizes:
        packed = [FORMATS[form].pack("x.weight", torch.randn(size, columns))[0] for _ in range(EXPERTS)]
        names = {name: name.removeprefix(base) for name in packed[0]}
        projections.append({suffix: torch.stack([each[name] for each in packed]) for name, suffix in names.items()})
    return QuantizedStack(scheme, projections, merged=False)


def scattered(product: GroupedProduct, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the product of ``rows``, which are already in the order of their pairs."""
    out = rows.new_full((len(rows), product.out_features), torch.nan)
    product.scatter(rows, ExpertRows(ends, torch.arange(len(rows), dtype=torch.int32), 1), out)
    return out


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", KEPT)
@torch.inference_mode()
def test_a_product_is_that_of_the_dequantized_weight_and_rows_of_nobody_are_left(form: str, biased: bool) -> None:
    weight, rows = stack(form), torch.randn(7, COLUMNS)
    dense = weight.dequantize(torch.float32)
    dense = dense.transpose(1, 2) if form == "mxfp4" else dense
    bias = torch.randn(EXPERTS, 64) if biased else None
    owners, ends = torch.tensor([0, 0, 2, 2, 2, 2]), torch.tensor([2, 2, 6], dtype=torch.int32)
    expected = torch.einsum("rk,rnk->rn", rows[:6], dense[owners]) + (bias[owners] if bias is not None else 0)
    product = grouped(weight, bias, TorchKernels(), transposed=form == "mxfp4")
    assert product.out_features == 64
    torch.testing.assert_close(scattered(product, rows, ends)[:6], expected)
    for held in product.held:
        held.to(torch.device("cpu"))
    torch.testing.assert_close(weight.dequantize(torch.float32), dense.transpose(1, 2) if form == "mxfp4" else dense)


@torch.inference_mode()
def test_an_odd_number_of_blocks_is_halved_within_them() -> None:
    weight = stack("mxfp4", columns=96)
    rows, ends = torch.randn(3, 96), torch.tensor([1, 2, 3], dtype=torch.int32)
    expected = torch.einsum("rk,rkn->rn", rows, weight.dequantize(torch.float32))
    product = grouped(weight, None, TorchKernels(), transposed=True)
    torch.testing.assert_close(scattered(product, rows, ends), expected)


@torch.inference_mode()
def test_8_bit_numbers_are_held_once() -> None:
    weight = stack("fbgemm")
    product = grouped(weight, None, TorchKernels(), transposed=False)
    assert isinstance(product, QuantizedGroups)
    assert len({each[""].untyped_storage().data_ptr() for each in weight.projections}) == 1
    assert product.num_bytes == EXPERTS * 64 * (COLUMNS + 4)
    empty(weight)
    assert sum(parameter.numel() for parameter in weight.parameters()) == 0


@pytest.mark.parametrize("form", NOT_KEPT)
def test_weights_that_no_product_takes_are_refused(form: str) -> None:
    with pytest.raises(UnsuitableError, match="quantized experts' weights of type "):
        grouped(stack(form), None, TorchKernels(), transposed=False)


@pytest.mark.parametrize(
    ("architecture", "form", "num_bytes"),
    [
        # Of each of 2 layers 4 experts of 3 * 32 rows of 64 columns: numbers, 2 scales of 4 bytes a row (1 of down's
        # rows).
        ("qwen3_moe", "fp8-blocks", 2 * 4 * (3 * 32 * 64 + 4 * (2 * 64 + 64))),
        # And 4 of 3 * 64 rows of 64: half a byte each, and a byte for each 32 of them.
        ("gpt_oss", "mxfp4", 2 * 4 * (3 * 64 * 64 // 2 + 3 * 64 * 2)),
    ],
)
def test_the_decoder_is_proved_with_experts_that_stay_quantized_and_holds_them_alone(
    architecture: str, form: str, num_bytes: int, tmp_path: Path
) -> None:
    save_quantized_model(architecture, form, tmp_path, hidden_size=64)
    probed = load_probed(tmp_path, keeps)
    kept = [each for each in probed.model.module.modules() if isinstance(each, QuantizedExperts)]
    assert len(kept) == 2
    proven = prove(probed, lambda: FusedForward(probed, TorchKernels()))
    assert proven.serves is not None, proven.reasons
    held = [held for layer in proven.serves._layers._layers for held in layer.mlp.held]
    assert sum(each.num_bytes for each in held) == num_bytes
    assert all(
        parameter.numel() == 0 for each in kept for parameter in (*each.gate_up.parameters(), *each.down.parameters())
    )
