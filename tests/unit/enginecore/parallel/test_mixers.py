"""Recurrent layers that are split by heads compute the whole layers' results, and what is not known is refused."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.state_hook import find_mixers
from penstock_enginecore.parallel.mixers import SpreadNorm, check_mixers, split_mixer
from penstock_enginecore.parallel.tensor_parallel import SplitModel, split_model
from tests.fakes.engines.thread_collectives import thread_ranks
from tests.fakes.models.tiny_models import RECURRENT_ARCHITECTURES, VOCAB_SIZE, save_tiny_model

TOKENS = torch.arange(1, 25)[None] * 7 % VOCAB_SIZE
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in RECURRENT_ARCHITECTURES},
    "one group": ("granitemoehybrid", {"mamba_n_groups": 1, "mamba_proj_bias": True}),
    "norm first": (
        "falcon_h1",
        {"mamba_n_groups": 1, "mamba_rms_norm": True, "ssm_multipliers": [0.5, 2.0, 3.0, 0.25, 4.0]},
    ),
    "gate first": ("falcon_h1", {"mamba_n_groups": 1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "experts": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "ME*E",
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "adapters of shared layers": (
        "zamba2",
        {"use_shared_attention_adapter": True, "num_key_value_heads": 4, "num_mem_blocks": 2},
    ),
    "biases": ("lfm2", {"conv_bias": True}),
    "one key head": ("qwen3_5", {"linear_num_key_heads": 1}),
    "one key head, interleaved": ("qwen3_next", {"linear_num_key_heads": 1}),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def in_parts(model: Any, size: int) -> list[tuple[Any, SplitModel, torch.Tensor]]:
    """Return each rank's part of the model, its features, and its logits."""

    def run(part: Any, group: Any) -> tuple[Any, SplitModel, torch.Tensor]:
        left = split_model(part, group)
        with torch.inference_mode():
            return part, left, part(input_ids=TOKENS, use_cache=False).logits

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, [copy.deepcopy(model) for _ in range(size)], thread_ranks(size)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_give_the_logits_of_the_whole(name: str, size: int, tmp_path: Path) -> None:
    architecture, changes = MODELS[name]
    model: Any = save_tiny_model(architecture, tmp_path, **changes).eval()
    with torch.inference_mode():
        expected = model(input_ids=TOKENS, use_cache=False).logits
    linears = {name: child for name, child in model.named_modules() if isinstance(child, torch.nn.Linear)}
    parts = in_parts(model, size)
    for part, left, logits in parts:
        assert torch.equal(logits, parts[0][2])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        for mixer in find_mixers(part):
            own = {name: linear for name, linear in linears.items() if name.startswith(f"{mixer}.")}
            assert own.keys() <= left.features.keys(), "adapters of all linear layers are split"
            for name, whole in own.items():
                rows, columns = left.features[name].outputs, left.features[name].inputs
                kept = whole.weight if rows is None else torch.cat([whole.weight[r.start : r.stop] for r in rows])
                kept = kept if columns is None else kept[:, columns.start : columns.stop]
                assert torch.equal(part.get_submodule(name).weight, kept)
    whole = sum(parameter.numel() for parameter in model.parameters())
    for part, _, _ in parts:
        own = sum(parameter.numel() for parameter in part.parameters())
        # Small models have many key heads, groups and adapters in relation to their size, which several ranks have.
        assert own < whole * (0.6 if size == 2 else 0.42)


@pytest.mark.parametrize("size", [2, 4])
def test_layers_with_common_weights_have_a_common_part(size: int, tmp_path: Path) -> None:
    model: Any = save_tiny_model("zamba2", tmp_path, tie_word_embeddings=True).eval()
    for part, _, _ in in_parts(model, size):
        one, other = (part.model.layers[index].shared_transformer for index in (1, 3))
        assert one.self_attn.q_proj.weight is other.self_attn.q_proj.weight
        assert one.feed_forward.down_proj.weight is other.feed_forward.down_proj.weight


@pytest.mark.parametrize(
    ("architecture", "size", "message"),
    [
        (
            "qwen3_next",
            3,
            r"executor\.tensor_parallel_size is 3; config\.json: linear_num_value_heads is 32 and linear_num_key_heads is 16, "
            r"which can be distributed to 1, 2, 4, 8, 16, 32 workers; use one of these sizes",
        ),
        (
            "granitemoehybrid",
            16,
            r"executor\.tensor_parallel_size is 16; config\.json: mamba_n_heads is 8 and mamba_n_groups is 2, which can be "
            r"distributed to 1, 2, 4, 8 workers; use one of these sizes",
        ),
    ],
)
def test_heads_that_cannot_be_distributed_are_refused(
    architecture: str, size: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        check_mixers(save_tiny_model(architecture, tmp_path), size)


def test_channels_that_cannot_be_distributed_are_refused(tmp_path: Path) -> None:
    model = save_tiny_model("lfm2", tmp_path)
    check_mixers(model, 5)
    name, mixer = next(iter(find_mixers(model).items()))
    with pytest.raises(ModelLoadError, match=rf"is 5; the 64 channels of {name} are not a multiple of this size"):
        split_mixer(name, mixer, thread_ranks(5)[0])


def first_mixer(architecture: str, path: Path, **changes: Any) -> tuple[str, Any]:
    return next(iter(find_mixers(save_tiny_model(architecture, path, **changes)).items()))


class _Quantized(torch.nn.Linear):
    pass


class _OtherNorm(torch.nn.Module):
    """A gated norm whose gate is not SiLU."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.group_size = norm.weight, norm.variance_epsilon, norm.group_size

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.nn.functional.rms_norm(hidden_states * gate.sigmoid(), (self.group_size,))


@pytest.mark.parametrize("part", ["layer", "parameter", "buffer", "norm", "kind"])
def test_unknown_parts_are_refused_by_name(part: str, tmp_path: Path) -> None:
    name, mixer = first_mixer("mamba2", tmp_path, n_groups=1)
    match part:
        case "layer":
            mixer.in_proj, message = _Quantized(48, 264), rf"{name}\.in_proj is _Quantized"
        case "parameter":
            mixer.new, message = torch.nn.Parameter(torch.zeros(8)), rf"{name}\.new has the shape \[8\]"
        case "buffer":
            mixer.register_buffer("factors", torch.zeros(8))
            message = rf"{name}\.factors has the shape \[8\]"
        case "norm":
            mixer.norm, message = _OtherNorm(mixer.norm), rf"{name}\.norm is _OtherNorm"
        case _:
            del mixer.n_groups
            message = rf"{name} is Mamba2Mixer"
    with pytest.raises(ModelLoadError, match=f"{message}, for which splitting by heads is not supported; set"):
        split_mixer(name, mixer, thread_ranks(2)[0])


@pytest.mark.parametrize("first", ["norm", "gate"])
def test_a_spread_norm_gives_the_norm_of_all_ranks(first: str, tmp_path: Path) -> None:
    changes = {"mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_norm_before_gate": first == "norm"}
    _, mixer = first_mixer("falcon_h1", tmp_path, **changes)
    norm, size = mixer.norm, 4
    whole = len(norm.weight)
    torch.nn.init.normal_(norm.weight)
    given, gate = torch.randn(2, 5, whole, generator=torch.Generator().manual_seed(1))
    expected = norm(given, gate)

    def run(group: Any) -> torch.Tensor:
        own = range(group.rank * whole // size, (group.rank + 1) * whole // size)
        part = slice(own.start, own.stop)
        spread = SpreadNorm(norm, own, whole // 2, group)
        assert spread.is_same(norm, whole)
        spread.weight = torch.nn.Parameter(norm.weight[part])
        return spread(given[:, part], gate[:, part])

    with ThreadPoolExecutor(size) as threads:
        found = torch.cat(list(threads.map(run, thread_ranks(size))), -1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
