"""Packed mixtures of experts against transformers' modules, and inside the kernels' decoder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.forward.native import NativeForward
from penstock_enginecore.forward.native_mixtures import PackedMixture
from penstock_enginecore.native.experts import choose
from penstock_enginecore.native.ffi_structs import Routing
from penstock_enginecore.native.library import NativeLibrary, open_library
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.models.tiny_models import save_narrow_model, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens
from tests.unit.enginecore.models.test_hybrid_reader import NEMOTRON_EXPERTS
from tests.unit.enginecore.native.test_decoder import build, run

TOKENS, VOCAB = 40, 333
MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 0},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "olmoe": {},
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 64},
}
"""Model types with experts of each kind that a group of ranks may divide."""


@pytest.fixture(scope="module", params=runnable())
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return open_library(request.param, 1)


def outside(forward: Any) -> dict[int, Any]:
    assert isinstance(forward, NativeForward)
    return forward._layers.outside


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_between_calls_of_the_decoder_gives_the_bits_of_one_inside(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of ranks computes its mixtures between calls of the decoder."""
    torch.set_num_threads(1)
    save_narrow_model(family, tmp_path, **{"hidden_size": 64, "vocab_size": VOCAB, **MIXTURES[family]})
    forward = build(tmp_path, "auto")
    assert outside(forward) == {}
    assert forward.is_batch_invariant
    inside = run(forward, VOCAB, (16,))
    monkeypatch.setattr(PackedMixture, "is_whole", False)
    between = build(tmp_path, "auto")
    assert list(outside(between)) == [0, 1]
    assert torch.equal(run(between, VOCAB, (16,)), inside)


@pytest.mark.parametrize(("family", "changes"), [("nemotron_h", NEMOTRON_EXPERTS), ("qwen3_5_moe", {})])
def test_models_with_recurrent_layers_compute_their_experts_inside_the_decoder(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    model = save_tiny_model(family, tmp_path, **changes)
    prompt = list(range(3, 40))
    engine = build_engine(tmp_path, cache={"block_size": 16, "num_blocks": 64})
    executor: Any = engine.executor
    assert outside(executor._worker.runner._forward) == {}
    wanted = SamplingParams(temperature=0.0, max_tokens=8)
    assert generate(engine, [("r", prompt, wanted)]).tokens["r"] == greedy_tokens(model, prompt, 8)
    engine.shutdown()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_oss", {"intermediate_size": 44}),
        ("llama4_text", {"intermediate_size": 44}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 44}),
    ],
)
def test_a_mixture_of_unsupported_sizes_stays_outside(family: str, changes: dict[str, int], tmp_path: Path) -> None:
    if runnable() == ["baseline"]:
        pytest.skip("44 is a multiple of the vector length of these kernels")
    torch.set_num_threads(1)
    save_narrow_model(family, tmp_path, hidden_size=64, **changes)
    kept = outside(build(tmp_path, "auto"))
    assert kept
    assert not any(isinstance(mlp, PackedMixture) for mlp in kept.values())


@pytest.mark.parametrize(("experts", "groups", "kept", "top"), [(8, 1, 1, 3), (32, 8, 3, 6), (66, 3, 1, 22)])
@pytest.mark.parametrize("normalize", [False, True])
def test_groups_of_experts_are_chosen_as_by_deepseek_v3(
    library: NativeLibrary, experts: int, groups: int, kept: int, top: int, normalize: bool
) -> None:
    config = DeepseekV3Config(
        hidden_size=16,
        n_routed_experts=experts,
        n_group=groups,
        topk_group=kept,
        num_experts_per_tok=top,
        norm_topk_prob=normalize,
        routed_scaling_factor=2.5,
    )
    router: Any = DeepseekV3TopkRouter(config).requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(experts)
    router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
    correction = torch.randn(experts, generator=generator)
    router.e_score_correction_bias.copy_(correction)
    logits, expected, chosen = router(torch.randn(TOKENS, 16, generator=generator))
    routing = Routing(experts, top, 1, normalize, groups, kept, 0, 2.5, correction.data_ptr(), None)
    found, places = choose(library, routing, logits)
    assert torch.equal(places.sort()[0], chosen.sort()[0])
    torch.testing.assert_close(found.gather(1, places.argsort()), expected.gather(1, chosen.argsort()))


def test_groups_of_experts_are_chosen_as_by_deepseek_v2(library: NativeLibrary) -> None:
    config = DeepseekV2Config(
        hidden_size=32,
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
    )
    router: Any = DeepseekV2TopkRouter(config).requires_grad_(requires_grad=False)
    torch.nn.init.normal_(router.weight)
    logits, weights, chosen = router(torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(2)))
    found, places = choose(library, Routing(12, 3, 0, False, 4, 2, 0, 1.5, None, None), logits)
    assert torch.equal(places.sort()[0], chosen.sort()[0])
    torch.testing.assert_close(found.gather(1, places.argsort()), weights.gather(1, chosen.argsort()))


def test_a_shared_expert_follows_the_chosen_experts_and_nan_stays_in_its_row(library: NativeLibrary) -> None:
    logits = torch.randn(TOKENS, 6, generator=torch.Generator().manual_seed(3))
    logits[4, 5] = torch.nan
    weights, chosen = choose(library, Routing(5, 2, 1, False, 1, 1, 2, 1.0, None, None), logits)
    assert chosen[:, 2].tolist() == [5] * TOKENS
    assert torch.equal(chosen[:, :2], logits[:, :5].topk(2)[1])
    torch.testing.assert_close(weights[:, :2], logits[:, :5].topk(2)[0].sigmoid())
    torch.testing.assert_close(weights[:, 2], logits[:, 5].sigmoid(), equal_nan=True)
    logits[9, 1] = torch.nan
    weights, _ = choose(library, Routing(5, 2, 1, False, 1, 1, 1, 1.0, None, None), logits)
    assert weights[9, :2].isnan().all()
    assert weights[:, 2].tolist() == [1.0] * TOKENS
    assert int(weights.isnan().any(1).sum()) == 1
