"""The towers' own quick GELU."""

import pytest
import torch
from transformers.activations import ACT2FN

from penstock_enginecore.models.multimodal.encoder import QuickGELU, use_quick_gelu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_those_of_transformers(dtype: torch.dtype) -> None:
    x = (torch.randn(37, 61, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)
    before = x.clone()
    assert torch.equal(QuickGELU()(x), ACT2FN["quick_gelu"](x))
    assert torch.equal(x, before)


def test_only_modules_of_its_kind_are_replaced() -> None:
    inner = torch.nn.ModuleDict({"quick": ACT2FN["quick_gelu"], "other": ACT2FN["gelu"]})
    tower = torch.nn.ModuleDict({"inner": inner, "outer": ACT2FN["quick_gelu"]})
    use_quick_gelu(tower)
    assert type(inner["quick"]) is type(tower["outer"]) is QuickGELU
    assert type(inner["other"]) is type(ACT2FN["gelu"])
