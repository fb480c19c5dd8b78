"""Plans of tensor parallelism: what is known is split, and what is not is refused by its name."""

import pytest

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.parallel.tensor_parallel import Heads, splits_of

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
    with pytest.raises(ModelLoadError, match=rf"the plan of M has 'model.layers.\*.mlp.x' as '{word}', .* use 1"):
        splits_of("M", PLAN | {"model.layers.*.mlp.x": word}, MODULES)


@pytest.mark.parametrize("plan", [None, {}])
def test_a_model_without_a_plan_is_refused(plan: dict[str, str] | None) -> None:
    with pytest.raises(ModelLoadError, match="M has no plan"):
        splits_of("M", plan, MODULES)


def test_a_plan_of_other_layers_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="the plan of M names no layer that it has"):
        splits_of("M", PLAN, ["transformer.h.0.attn"])


def test_heads_that_cannot_be_dealt_are_refused_with_the_sizes_that_can_be() -> None:
    Heads(8, 2).check(4)
    with pytest.raises(
        ModelLoadError,
        match="is 3; the model's 8 attention heads and 2 key-value heads can be dealt to 1, 2, 4, 8",
    ):
        Heads(8, 2).check(3)
    with pytest.raises(
        ModelLoadError, match=r"12 attention heads and 6 key-value heads can be dealt to 1, 2, 3, 6, 12 "
    ):
        Heads(12, 6).check(4)


@pytest.mark.parametrize(
    ("kv", "size", "expected"),
    [(4, 2, [[0, 1], [2, 3]]), (2, 2, [[0], [1]]), (2, 4, [[0], [0], [1], [1]]), (1, 3, [[0], [0], [0]])],
)
def test_fewer_key_value_heads_than_ranks_are_had_by_several(kv: int, size: int, expected: list[list[int]]) -> None:
    assert [list(Heads(12, kv).kv_heads(rank, size)) for rank in range(size)] == expected
