"""A sharded model computes the results of the whole one, and every rank has the full result, with the same bits."""

import copy
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.parallel.collectives import Collectives, GlooCollectives
from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.tensor_parallel import Heads, split_model, splits_of
from tests.fakes.engines.thread_collectives import thread_ranks
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "phi3": {},  # gathered outputs, whole heads
    "gemma2": {},  # scaled embeddings
    "mixtral": {},  # experts
    "deepseek_v2": {},  # latent keys and values
    "gemma4_shared": {},  # shared keys and values
    "gemma3n": {},
    "gpt_oss": {},  # Penstock's own plan: sinks, and experts with biases
    # Words that are not alike for all ranks, with a head of the embedding's weights.
    "tied": {"vocab_size": VOCAB_SIZE + 1, "tie_word_embeddings": True},
}
MOSTLY_SPLIT = ("gemma3n",)
"""Families with more weights that each rank has as a whole."""
TOKENS = torch.arange(1, 25)[None] * 7 % VOCAB_SIZE


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def whole_model(family: str, path: Path) -> Any:
    return save_tiny_model("llama" if family == "tied" else family, path, **FAMILIES[family]).eval()


def in_parts(model: Any, groups: Sequence[Collectives]) -> list[Any]:
    """Return each rank's part of the model, and its logits."""
    parts = [copy.deepcopy(model) for _ in groups]

    def run(part: Any, group: Collectives) -> torch.Tensor:
        split_model(part, group)
        with torch.inference_mode():
            return part(input_ids=TOKENS, use_cache=False).logits

    with ThreadPoolExecutor(len(parts)) as threads:
        return list(zip(parts, threads.map(run, parts, groups), strict=True))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_give_the_logits_of_the_whole(family: str, size: int, tmp_path: Path) -> None:
    model = whole_model(family, tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=TOKENS, use_cache=False).logits
    parts = in_parts(model, thread_ranks(size))
    for _, logits in parts:
        assert torch.equal(logits, parts[0][1])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    whole = sum(parameter.numel() for parameter in model.parameters())
    for part, _ in parts:
        own = sum(parameter.numel() for parameter in part.parameters())
        assert own < whole * (0.55 if size == 2 else 0.35) + whole * (0.04 if family in MOSTLY_SPLIT else 0)
        assert not any(parameter.requires_grad for parameter in part.lm_head.parameters())


@pytest.mark.usefixtures("one_thread")
def test_gloo_adds_up_and_gathers(tmp_path: Path) -> None:
    size = 2
    store = os.memfd_create("store")
    model = whole_model("llama", tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=TOKENS, use_cache=False).logits
    with ThreadPoolExecutor(size) as threads:
        groups = list(threads.map(lambda rank: GlooCollectives(Meeting(store), rank, size), range(size)))
    first, second = in_parts(model, groups)
    assert torch.equal(first[1], second[1])
    torch.testing.assert_close(first[1], expected, atol=1e-4, rtol=1e-4)
    os.close(store)


@pytest.mark.usefixtures("one_thread")
def test_a_model_that_computes_something_else_in_parts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = whole_model("llama", tmp_path)
    groups = thread_ranks(2)
    for group in groups:
        monkeypatch.setattr(group, "all_reduce", lambda tensor: tensor)  # simulates a missing sum over the ranks
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM gives other results when split: its logits differ by"):
        in_parts(model, groups)


def test_other_layers_than_linear_ones_are_refused_by_name(tmp_path: Path) -> None:
    model = whole_model("llama", tmp_path)

    class Quantized(torch.nn.Linear):
        pass

    model.model.layers[1].mlp.down_proj = Quantized(64, 48)
    group = thread_ranks(2)[0]
    with pytest.raises(ModelLoadError, match=r"model.layers.1.mlp.down_proj of LlamaForCausalLM is Quantized"):
        split_model(model, group)


def test_layers_that_do_not_divide_are_refused_with_their_size(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path, intermediate_size=66)
    group = thread_ranks(4)[0]
    with pytest.raises(
        ModelLoadError, match=r"is 4; the 66 (out|in)puts of model.layers.0.mlp.\w+ are not a multiple of this size"
    ):
        split_model(model, group)


# Plans of tensor parallelism: known layers are split, and unknown ones are refused by name.

PLAN = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}
MODULES = [
    "model",
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.self_attn.q_proj",
    "model.layers.11.self_attn.q_norm",
    "model.layers.11.self_attn.o_proj",
    "model.layers.x.self_attn.o_proj",
    "lm_head",
]


def test_names_with_numbers_are_found_and_others_stay_whole() -> None:
    assert splits_of("M", PLAN, MODULES) == {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.0.self_attn.q_proj": "colwise",
        "model.layers.11.self_attn.q_proj": "colwise",
        "model.layers.11.self_attn.o_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }


def test_the_text_model_of_qwen3_vl_has_a_plan_of_ours() -> None:
    layer = {
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.o_proj": "rowwise",
        "mlp.gate_proj": "colwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
    }
    whole = ["model.embed_tokens", "model.norm", "model.layers.1.self_attn.q_norm", "model.layers.1.input_layernorm"]
    names = ["lm_head", *whole, *(f"model.layers.1.{name}" for name in layer)]
    found = splits_of("Qwen3VLForCausalLM", None, names)
    assert found == {
        "lm_head": "colwise_gather_output",
        **{f"model.layers.1.{name}": how for name, how in layer.items()},
    }


@pytest.mark.parametrize("word", ["moe_identity_expert", "colwise_split_input", "sequence_parallel"])
def test_a_word_that_is_not_known_is_refused_with_where_it_stands(word: str) -> None:
    with pytest.raises(
        ModelLoadError, match=rf"the tensor-parallel plan of M splits 'model.layers.\*.mlp.x' as '{word}', .* to 1"
    ):
        splits_of("M", PLAN | {"model.layers.*.mlp.x": word}, MODULES)


@pytest.mark.parametrize("plan", [None, {}])
def test_a_model_without_a_plan_is_refused(plan: dict[str, str] | None) -> None:
    with pytest.raises(ModelLoadError, match="M has no tensor-parallel plan"):
        splits_of("M", plan, MODULES)


def test_a_plan_of_other_layers_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="the tensor-parallel plan of M matches no layer of the model"):
        splits_of("M", PLAN, ["transformer.h.0.attn"])


def test_heads_that_cannot_be_dealt_are_refused_with_the_sizes_that_can_be() -> None:
    Heads(8, 2).check(4)
    with pytest.raises(
        ModelLoadError,
        match="is 3; the model's 8 attention heads and 2 key-value heads can be distributed to 1, 2, 4, 8",
    ):
        Heads(8, 2).check(3)
    with pytest.raises(
        ModelLoadError, match=r"12 attention heads and 6 key-value heads can be distributed to 1, 2, 3, 6, 12 "
    ):
        Heads(12, 6).check(4)


@pytest.mark.parametrize(
    ("kv", "size", "expected"),
    [(4, 2, [[0, 1], [2, 3]]), (2, 2, [[0], [1]]), (2, 4, [[0], [0], [1], [1]]), (1, 3, [[0], [0], [0]])],
)
def test_fewer_key_value_heads_than_ranks_are_had_by_several(kv: int, size: int, expected: list[list[int]]) -> None:
    assert [list(Heads(12, kv).kv_heads(rank, size)) for rank in range(size)] == expected
