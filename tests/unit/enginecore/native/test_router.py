"""Routers of the kernels against transformers'."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from penstock_enginecore.native.backend import PackedLayers
from penstock_enginecore.native.experts import PackedRouter
from penstock_enginecore.native.library import NativeLibrary, open_library
from tests.fakes.engines.instruction_sets import runnable

HIDDEN = 48


@pytest.fixture(scope="module", params=runnable())
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return open_library(request.param, 3)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def make(kind: str, num_experts: int, top: int, *, normalize: bool = False) -> Any:
    if kind == "mixtral":
        router: Any = MixtralTopKRouter(
            MixtralConfig(hidden_size=HIDDEN, num_local_experts=num_experts, num_experts_per_tok=top)
        )
    elif kind == "gpt_oss":
        router = GptOssTopKRouter(
            GptOssConfig(hidden_size=HIDDEN, num_local_experts=num_experts, num_experts_per_tok=top)
        )
        torch.nn.init.normal_(router.bias, std=0.3)
    else:
        sizes = {"hidden_size": HIDDEN, "num_experts": num_experts, "num_experts_per_tok": top}
        config, of = {
            "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeTopKRouter),
            "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeTopKRouter),
        }[kind]
        router = of(config(**sizes, norm_topk_prob=normalize))
    torch.nn.init.normal_(router.weight, std=0.3)
    return router


@pytest.mark.parametrize("kind", ["gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(("num_experts", "top"), [(2, 1), (6, 6), (8, 2), (33, 4), (128, 8), (1024, 3)])
@pytest.mark.parametrize("normalize", [False, True])
def test_tokens_go_to_the_experts_of_transformers(
    library: NativeLibrary, kind: str, num_experts: int, top: int, normalize: bool
) -> None:
    router = make(kind, num_experts, top, normalize=normalize)
    packed = PackedRouter(library, router)
    for states in (torch.randn(1, HIDDEN), torch.randn(37, HIDDEN), torch.randn(1, 5, HIDDEN), torch.empty(0, HIDDEN)):
        if kind == "gpt_oss" and states.ndim > 2:
            continue  # this router expects rows
        logits, weights, experts = packed(states)
        expected_logits, expected_weights, expected_experts = router(states)
        torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
        assert torch.equal(experts, expected_experts)


def test_a_tokens_experts_and_weights_have_the_same_bits_in_every_batch(library: NativeLibrary) -> None:
    packed = PackedRouter(library, make("qwen3_moe", 33, 4, normalize=True))
    states = torch.randn(61, HIDDEN)
    whole = packed(states)
    for first, end in [(row, row + 1) for row in range(61)] + [(0, 17), (5, 38)]:
        for part, all_of_it in zip(packed(states[first:end]), whole, strict=True):
            assert torch.equal(part, all_of_it[first:end])


def test_of_equal_logits_the_first_ones_are_chosen(library: NativeLibrary) -> None:
    router = make("qwen3_moe", 7, 3, normalize=True)
    router.weight[:] = 1.0
    _, weights, experts = PackedRouter(library, router)(torch.ones(2, HIDDEN))
    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_logits_far_apart_leave_one_expert_all_of_the_weight(library: NativeLibrary) -> None:
    router = make("mixtral", 8, 2)
    router.weight[:] = 0.0
    router.weight[5], router.weight[2] = 1000.0, -1000.0
    _, weights, experts = PackedRouter(library, router)(torch.ones(1, HIDDEN))
    assert experts.tolist() == [[5, 0]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_is_routed_to_existing_experts_and_affects_no_other_token(library: NativeLibrary, poison: float) -> None:
    packed = PackedRouter(library, make("qwen3_moe", 12, 4, normalize=True))
    states = torch.randn(3, HIDDEN)
    expected = packed(states)
    states[1, 7] = poison
    _, weights, experts = packed(states)
    assert sorted(set(experts[1].tolist())) == sorted(experts[1].tolist())  # each once
    assert int(experts.min()) >= 0
    assert int(experts.max()) < 12
    assert weights[1].isnan().any()
    for row in (0, 2):
        assert torch.equal(weights[row], expected[1][row])
        assert torch.equal(experts[row], expected[2][row])


def test_hooks_of_the_router_are_called(library: NativeLibrary) -> None:
    router = make("mixtral", 4, 2)
    seen: list[torch.Tensor] = []
    router.register_forward_hook(lambda module, args, output: seen.append(output[2]))
    _, _, experts = PackedRouter(library, router)(torch.randn(3, HIDDEN))
    assert [each is experts for each in seen] == [True]


def test_a_mixtures_router_is_packed_beside_its_experts(library: NativeLibrary) -> None:
    config = MixtralConfig(hidden_size=HIDDEN, num_local_experts=6, num_experts_per_tok=3, intermediate_size=64)
    config._experts_implementation = "eager"
    mixture: Any = MixtralSparseMoeBlock(config).requires_grad_(requires_grad=False)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    states = torch.randn(1, 61, HIDDEN)
    expected = mixture(states)
    PackedLayers(torch.nn.ModuleList([mixture]), library)
    assert isinstance(mixture.gate, PackedRouter)
    whole = mixture(states)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    for row in range(61):
        assert torch.equal(mixture(states[:, row : row + 1]), whole[:, row : row + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_router_in_half_precision_stays_as_it_is(dtype: torch.dtype) -> None:
    assert not PackedRouter.takes(make("mixtral", 4, 2).to(dtype))
