"""Weights and activations in 8-bit floats on a device: kernels against plain torch, and tokens against transformers."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.forward.cuda.kernel_api import Float8Weight
from penstock_enginecore.forward.cuda.packing import float8_part, pack_float8
from penstock_enginecore.models.quantization.rounding import rounded
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.models.quantized_models import round_rows_to_float8
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.models.torch_kernels import rounded_rows
from tests.fakes.models.transformers_greedy import greedy_tokens

_NEW_TOKENS = 12
_ROWS, _COLUMNS, _FEATURES = 640, 4096, 1024


def activations(device: str) -> dict[str, Any]:
    """Compare 8-bit activations with torch's bit by bit, and their products with float32 products."""
    from penstock_enginecore.forward.cuda.kernels import scaled  # imported here, because it imports Triton

    generator = torch.Generator().manual_seed(0)
    tensors, _ = rounded(torch.randn(_FEATURES, _COLUMNS, generator=generator))
    dense = (tensors[""].float() * tensors["_scale"]).to(device)
    part = float8_part(_COLUMNS, _COLUMNS)
    weight = Float8Weight(pack_float8(tensors[""], part), tensors["_scale"].t().contiguous(), _COLUMNS, part)
    equal, errors = True, {}
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(_ROWS, _COLUMNS, generator=generator).to(device, dtype)
        numbers, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(_ROWS, 1, device=device)
        scaled.round_rows(x, numbers, scales)
        wanted, wanted_scales = rounded_rows(x)
        equal &= torch.equal(scales, wanted_scales)
        equal &= torch.equal(numbers.view(torch.uint8), wanted.view(torch.uint8))
        out = torch.empty(_ROWS, _FEATURES, dtype=dtype, device=device)
        scaled.scaled_product(x, weight.to(torch.device(device)), None, 1.0, out)
        expected = (numbers.float() * scales) @ dense.t()
        errors[str(dtype)] = float((out.float() - expected).norm() / expected.norm())
    says = ", ".join(f"{dtype} {error:.2e}" for dtype, error in errors.items())
    return {"ok": equal and max(errors.values()) < 0.01, "says": f"rounding equal: {equal}, errors of products: {says}"}


def rounded_mixture(device: str) -> dict[str, Any]:
    """Compare tokens of a mixture whose weights are rounded at load with transformers' tokens with rounded weights."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (3, 34, 90)]
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model("qwen3_moe", Path(folder), hidden_size=256, head_dim=64, initializer_range=0.1)
        round_rows_to_float8(model)
        expected = [greedy_tokens(model, prompt, _NEW_TOKENS) for prompt in prompts]
        settings = {"device": device, "dtype": "float32", "quantization": "fp8"}
        engine = build_engine(Path(folder), model=settings, cache={"block_size": 16, "num_blocks": 256})
        wanted = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)
        run = generate(engine, [(str(i), prompt, wanted) for i, prompt in enumerate(prompts)])
        engine.shutdown()
    same = sum(run.tokens[str(i)] == tokens for i, tokens in enumerate(expected))
    return {"ok": same == len(prompts), "says": f"{same}/{len(prompts)} prompts with the same tokens"}
