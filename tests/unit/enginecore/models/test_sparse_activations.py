"""Sparse activations with a factor that is computed once have the bits of transformers' activations."""

from typing import Any

import pytest
import torch
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from penstock_enginecore.models.sparse_activations import install, set_statistics
from tests.fakes.models.tiny_models import tiny_config


def mlp_of(layer: int) -> Any:
    torch.manual_seed(0)
    return Gemma3nTextMLP(tiny_config("gemma3n"), layer).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_outputs_have_the_bits_of_transformers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, states = mlp_of(0).to(dtype), torch.randn(5, 48).to(dtype)
    expected = mlp(states)
    install(mlp)
    monkeypatch.delattr(torch.distributions.normal, "Normal")
    assert torch.equal(mlp(states), expected)


def test_other_layers_and_layers_with_statistics_of_their_own_stay_unchanged() -> None:
    dense, sparse = mlp_of(1), mlp_of(0)
    set_statistics(sparse, lambda gates: (gates, gates))
    own = sparse._gaussian_topk
    install(torch.nn.ModuleList([dense, sparse]))
    assert "_gaussian_topk" not in vars(dense)
    assert sparse._gaussian_topk is own
