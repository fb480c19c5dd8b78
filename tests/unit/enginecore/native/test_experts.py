"""Packed experts against transformers' own."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AfmoeConfig, GptOssConfig, GraniteMoeConfig, MixtralConfig, NemotronHConfig, Qwen2MoeConfig
from transformers.models.afmoe.modeling_afmoe import AfmoeSparseMoeBlock
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeMoE
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from penstock_enginecore.models.dtypes import narrow, num_bytes
from penstock_enginecore.native.backend import PackedLayers
from penstock_enginecore.native.experts import PackedExperts, RouterWeight
from penstock_enginecore.native.library import NativeLibrary, open_library
from tests.fakes.engines.instruction_sets import runnable

HIDDEN, NUM_EXPERTS, TOP = 40, 6, 3


@pytest.fixture(scope="module", params=runnable())
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return open_library(request.param, 3)


def make(kind: str, width: int = 64) -> Any:
    """Experts of random weights: of silu's gate, of a gate of their own with biases and inputs first, and without a
    gate.
    """
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP}
    if kind == "mixtral":
        experts: Any = MixtralExperts(MixtralConfig(**sizes, num_local_experts=NUM_EXPERTS, intermediate_size=width))
    elif kind == "gelu":
        config = MixtralConfig(
            **sizes, num_local_experts=NUM_EXPERTS, intermediate_size=width, hidden_act="gelu_pytorch_tanh"
        )
        experts = MixtralExperts(config)
    elif kind == "gpt_oss":
        experts = GptOssExperts(GptOssConfig(**sizes, num_local_experts=NUM_EXPERTS, intermediate_size=width))
    else:
        experts = NemotronHExperts(
            NemotronHConfig(
                **sizes, n_routed_experts=NUM_EXPERTS, moe_intermediate_size=width, layers_block_type=["moe"]
            )
        )
    experts.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(width)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return experts.requires_grad_(requires_grad=False)


def route(tokens: int, *, experts: int = NUM_EXPERTS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, and for each token different experts and their weights."""
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:TOP] for _ in range(tokens)])
    return torch.randn(tokens, HIDDEN, generator=generator), chosen, torch.rand(tokens, TOP, generator=generator)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 130])
@pytest.mark.parametrize(
    ("kind", "width"),
    [("mixtral", 64), ("mixtral", 24), ("gelu", 64), ("gpt_oss", 64), ("gpt_oss", 24), ("nemotron_h", 24)],
)
def test_packed_experts_compute_what_transformers_do(
    library: NativeLibrary, kind: str, width: int, tokens: int
) -> None:
    experts = make(kind, width)
    assert PackedExperts.takes(experts)
    step = route(tokens)
    torch.testing.assert_close(PackedExperts(library, experts)(*step), experts(*step), rtol=1e-4, atol=1e-4)


def test_experts_that_nobody_is_routed_to_and_steps_without_tokens_are_fine(library: NativeLibrary) -> None:
    experts = make("mixtral")
    packed = PackedExperts(library, experts)
    step = route(9, experts=TOP)
    torch.testing.assert_close(packed(*step), experts(*step), rtol=1e-4, atol=1e-4)
    none = packed(torch.empty(0, HIDDEN), torch.empty(0, TOP, dtype=torch.int64), torch.empty(0, TOP))
    assert none.shape == (0, HIDDEN)


def test_a_tokens_sum_is_the_same_bits_whatever_is_computed_beside_it(library: NativeLibrary) -> None:
    packed = PackedExperts(library, make("mixtral"))
    states, chosen, weights = route(60)
    whole = packed(states, chosen, weights)
    for start, end in ((0, 1), (3, 5), (10, 23), (59, 60)):
        part = slice(start, end)
        assert torch.equal(packed(states[part], chosen[part], weights[part]), whole[part])


@pytest.mark.parametrize("kind", ["gelu", "gpt_oss", "nemotron_h"])
def test_bits_are_the_same_with_an_activation_of_torchs_too(library: NativeLibrary, kind: str) -> None:
    packed = PackedExperts(library, make(kind, 24))
    states, chosen, weights = route(37)
    whole = packed(states, chosen, weights)
    for row in range(37):
        part = slice(row, row + 1)
        assert torch.equal(packed(states[part], chosen[part], weights[part]), whole[part])


def test_a_routers_choice_is_the_same_bits_whatever_is_computed_beside_it(library: NativeLibrary) -> None:
    config = GraniteMoeConfig(
        hidden_size=HIDDEN, num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP, intermediate_size=64
    )
    config._experts_implementation = "eager"
    mixture: Any = GraniteMoeMoE(config).requires_grad_(requires_grad=False)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    states = torch.randn(1, 61, HIDDEN)
    expected, weight = mixture(states), mixture.router.weight
    PackedLayers(torch.nn.ModuleList([mixture]), library)
    assert isinstance(mixture.router.weight, RouterWeight)
    assert mixture.router.weight.sum() == weight.sum()
    whole = mixture(states)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    for row in range(61):
        assert torch.equal(mixture(states[:, row : row + 1]), whole[:, row : row + 1])


@pytest.mark.parametrize("num_experts", [6, 33, 64])
@pytest.mark.parametrize("kind", ["sigmoid of one number", "sigmoids of the experts"])
def test_a_mixtures_output_has_the_same_bits_in_every_batch(
    library: NativeLibrary, kind: str, num_experts: int
) -> None:
    sizes = {
        "hidden_size": HIDDEN,
        "num_experts": num_experts,
        "num_experts_per_tok": TOP,
        "moe_intermediate_size": 64,
    }
    if kind == "sigmoid of one number":
        mixture: Any = Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=64))
    else:
        mixture = AfmoeSparseMoeBlock(AfmoeConfig(**sizes))
    for parameter in mixture.requires_grad_(requires_grad=False).parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    states = torch.randn(1, 61, HIDDEN)
    expected = mixture(states)
    PackedLayers(torch.nn.ModuleList([mixture]), library)
    whole = mixture(states)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-3)
    for first, end in [(row, row + 1) for row in range(61)] + [(0, 17), (17, 61), (5, 38)]:
        assert torch.equal(mixture(states[:, first:end]), whole[:, first:end])


def test_rows_whose_width_is_a_page_are_as_right_as_others(library: NativeLibrary) -> None:
    config = MixtralConfig(hidden_size=1024, num_local_experts=2, intermediate_size=1024)
    config._experts_implementation = "eager"
    experts = MixtralExperts(config).requires_grad_(requires_grad=False)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.03)
    step = torch.randn(12, 1024), torch.tensor([[0, 1]] * 12), torch.rand(12, 2)
    torch.testing.assert_close(PackedExperts(library, experts)(*step), experts(*step), rtol=1e-4, atol=1e-4)


def test_weights_that_bfloat16_holds_are_kept_in_it(library: NativeLibrary) -> None:
    experts = make("mixtral")
    whole = PackedExperts(library, experts).num_bytes
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(parameter.bfloat16())
    packed = PackedExperts(library, experts)
    if library.isa == "amx":  # whose tiles have 32 columns: 40 of the first product become 64
        rows, padded = 128 + 64, 64
        assert 2 * packed.num_bytes == whole * (rows * padded) // (128 * 40 + 64 * 64)
    else:
        assert 2 * packed.num_bytes == whole
    step = route(8)
    torch.testing.assert_close(packed(*step), experts(*step), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h"])
def test_an_expert_is_packed_aside_while_steps_compute_as_it_would_be_in_its_place(
    library: NativeLibrary, kind: str, half: bool
) -> None:
    experts, others = make(kind), make(kind)
    with torch.no_grad():
        for one, other in zip(experts.parameters(), others.parameters(), strict=True):
            one.copy_(one.bfloat16() if half else one)
            other.copy_(-2 * one)
    packed = PackedExperts(library, experts)
    step = route(30)
    expected = packed(*step)
    weights = [{name: each[i] for name, each in others.named_parameters()} for i in range(NUM_EXPERTS)]
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(lambda: [packed.packed(each) for each in weights for _ in range(20)][::20])
        while not making.done():
            assert torch.equal(packed(*step), expected)
    for i, each in enumerate(weights):
        packed.write(i, each)
        assert all(map(torch.equal, packed.slot_memory(i), making.result()[i]))
    assert torch.equal(packed(*step), PackedExperts(library, others)(*step))


def test_an_expert_that_does_not_fit_is_not_packed_aside(library: NativeLibrary) -> None:
    experts = make("mixtral")
    weights = {name: each[0] for name, each in experts.named_parameters()}
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(parameter.bfloat16())
    packed = PackedExperts(library, experts)
    with pytest.raises(ValueError, match="bfloat16 does not represent every element"):
        packed.packed({name: each + 1e-6 for name, each in weights.items()})
    with pytest.raises(ValueError, match=r"a weight of shape \[.*\] does not fit"):
        packed.packed({name: each[:, :-1].bfloat16().float() for name, each in weights.items()})


def test_experts_take_the_place_of_their_module_with_its_hooks(library: NativeLibrary) -> None:
    experts = make("gpt_oss")
    doubled = experts.register_forward_hook(lambda module, args, output: 2 * output)
    model = torch.nn.Sequential(experts)
    step = route(5)
    expected = experts(*step)
    layers = PackedLayers(model, library)
    assert isinstance(model[0], PackedExperts)
    assert layers.num_layers == 1
    torch.testing.assert_close(model[0](*step), expected, rtol=1e-4, atol=1e-4)
    assert sum(parameter.numel() for parameter in experts.parameters()) == 0
    doubled.remove()


def test_the_gate_of_gpt_oss_is_clamped_and_keeps_nan(library: NativeLibrary) -> None:
    experts = make("gpt_oss")
    with torch.no_grad():
        experts.gate_up_proj.mul_(20)  # most gates and up values are beyond the limits
    packed = PackedExperts(library, experts)
    assert packed.gate is not None
    states, chosen, weights = route(30)
    torch.testing.assert_close(packed(states, chosen, weights), experts(states, chosen, weights), rtol=1e-4, atol=1e-3)
    states[7, 3] = torch.nan
    found = packed(states, chosen, weights)
    assert found[7].isnan().all()
    assert not found[:7].isnan().any()


@pytest.mark.parametrize("half", [False, True])
def test_freed_weights_need_no_memory_even_if_a_plan_refers_to_them(half: bool) -> None:
    experts = make("mixtral")
    if half:
        narrow(experts.bfloat16())
    held = list(experts.parameters())
    PackedExperts(open_library("baseline", 1), experts).free()
    assert sum(map(num_bytes, (*held, *experts.parameters()))) == 0


def test_experts_of_another_kind_are_left_alone(library: NativeLibrary) -> None:
    half, more, norm = make("mixtral").bfloat16(), make("mixtral"), make("mixtral")
    more.scale = torch.nn.Parameter(torch.ones(1))
    norm.has_post_expert_norm = True
    for experts in (half, more, norm, torch.nn.Linear(2, 2), torch.nn.Sequential()):
        assert not PackedExperts.takes(experts)


@pytest.mark.parametrize("states", [torch.zeros(2, HIDDEN + 1), torch.zeros(2, HIDDEN, dtype=torch.float64)])
def test_states_of_another_width_or_dtype_are_refused(library: NativeLibrary, states: torch.Tensor) -> None:
    packed = PackedExperts(library, make("mixtral"))
    with pytest.raises(TypeError, match=rf"float32 \[tokens, {HIDDEN}\], not {states.dtype} \[2, {states.shape[1]}\]"):
        packed(states, torch.zeros(2, TOP, dtype=torch.int64), torch.zeros(2, TOP))
