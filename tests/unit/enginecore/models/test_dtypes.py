"""Weights of 16 bits that models see as float32."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock_enginecore.models.dtypes import NarrowWeight, as_stored, narrow, num_bytes, settle, widened
from tests.fakes.models.tiny_models import save_narrow_model

KEPT = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
WIDE = KEPT.float()


@pytest.fixture(params=[False, True], ids=["plain", "inference"])
def weight(request: pytest.FixtureRequest):
    with torch.inference_mode(request.param):
        yield torch.nn.Parameter(NarrowWeight(KEPT), requires_grad=False)


def test_it_is_a_float32_parameter_of_half_the_memory(weight: torch.nn.Parameter) -> None:
    assert (weight.dtype, weight.shape, isinstance(weight, torch.nn.Parameter)) == (torch.float32, (6, 4), True)
    assert (num_bytes(weight), num_bytes(WIDE)) == (48, 96)
    assert torch.equal(widened(weight), WIDE)


def test_what_is_computed_with_it_is_float32s(weight: torch.nn.Parameter) -> None:
    x, bias = torch.randn(3, 4), torch.randn(6)
    assert torch.equal(F.linear(x, weight, bias), F.linear(x, WIDE, bias))
    assert torch.equal(x @ weight.T, x @ WIDE.T)
    assert torch.equal(weight * 2, WIDE * 2)
    assert torch.equal(x.to(weight.dtype), x)
    for made in (F.linear(x, weight), weight.sum(), weight * 2, torch.cat([weight, WIDE])):
        assert type(made) is torch.Tensor
        assert made.dtype == torch.float32


def test_rows_are_looked_up_before_they_are_widened(weight: torch.nn.Parameter) -> None:
    rows = torch.tensor([5, 0, 5])
    for made in (F.embedding(rows, weight), weight[rows], weight.index_select(0, rows)):
        assert type(made) is torch.Tensor
        assert torch.equal(made, WIDE[rows])


def test_views_and_copies_of_it_are_narrow(weight: torch.nn.Parameter) -> None:
    halves = weight.chunk(2)
    for made, expected in (
        (weight[2], WIDE[2]),
        (weight[1:5], WIDE[1:5]),
        (weight.T.contiguous(), WIDE.T),
        (weight.view(2, 3, 4).transpose(1, 2), WIDE.view(2, 3, 4).transpose(1, 2)),
        (weight.detach().clone(), WIDE),
        (halves[1], WIDE[3:]),
        (torch.cat(halves), WIDE),
    ):
        assert isinstance(made, NarrowWeight)
        assert made.kept.dtype == torch.bfloat16
        assert torch.equal(widened(made), expected)


def test_nothing_writes_to_it(weight: torch.nn.Parameter) -> None:
    for write in (lambda: weight.mul_(2), lambda: weight.copy_(WIDE), lambda: weight[0].zero_()):
        with pytest.raises(
            TypeError, match="it writes to a weight that is stored in 16 bits, and such weights are read-only"
        ):
            write()
    out = torch.zeros(6, 4)
    assert torch.equal(out.copy_(weight), WIDE)


def test_a_model_is_narrowed_and_what_nobody_takes_over_is_widened_but_embeddings() -> None:
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(6, 4), "layer": torch.nn.Linear(4, 6)})
    model["head"] = torch.nn.Linear(4, 6, bias=False)
    model["head"].weight = model["embedding"].weight
    model["layer"].register_buffer("scale", torch.ones(1))
    model.bfloat16()
    model["layer"].register_buffer("count", torch.ones(1, dtype=torch.int64))
    model["wide"] = torch.nn.Linear(2, 2, dtype=torch.float64)
    rows, x = torch.tensor([1, 3]), torch.randn(2, 4)
    wide = {name: parameter.float() for name, parameter in model.named_parameters(remove_duplicate=False)}
    narrow(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (model["layer"].scale.dtype, model["layer"].count.dtype) == (torch.float32, torch.int64)
    assert type(model["layer"].bias) is torch.nn.Parameter
    assert model["head"].weight is model["embedding"].weight
    before = model["embedding"].weight.kept.data_ptr()
    for widens in (4 * 24, 0):
        assert torch.equal(model["embedding"](rows), wide["embedding.weight"][rows])
        assert torch.equal(model["layer"](x), F.linear(x, wide["layer.weight"], wide["layer.bias"]))
        assert torch.equal(model["head"](x), F.linear(x, wide["head.weight"]))
        assert settle(model) == widens
    assert type(model["layer"].weight) is torch.nn.Parameter
    assert isinstance(model["embedding"].weight, NarrowWeight)
    assert model["head"].weight is model["embedding"].weight
    assert model["embedding"].weight.kept.data_ptr() != before


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_are_read_as_they_are_stored_but_those_that_a_model_keeps_in_float32(
    dtype: torch.dtype | None, tmp_path: Path
) -> None:
    save_narrow_model("deepseek_v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with as_stored(dtype):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.model.layers[0].self_attn.o_proj.weight.dtype == torch.bfloat16
    assert model.model.norm.weight.dtype == (dtype or torch.float32)
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
