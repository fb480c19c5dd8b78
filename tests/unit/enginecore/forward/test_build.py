"""Forward passes of a tiny checkpoint: how they are built and proved, and which modules they keep."""

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.build import BuiltForward, ForwardConfig, build_forward
from penstock_enginecore.forward.dummy_inputs import Probe
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, load_model
from tests.fakes.models.tiny_models import save_tiny_model

CPU = torch.device("cpu")
BASELINE = KernelsConfig(isa="baseline")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", directory, hidden_size=64)
    return directory


def load(path: Path) -> LoadedModel:
    return load_model(ModelConfig(path=str(path)), CPU, lambda line: None)


def build(model: LoadedModel, kernels: KernelsConfig) -> BuiltForward:
    return build_forward(model, ForwardConfig(CPU, "auto", kernels, num_threads=1, block_size=16))


@pytest.mark.parametrize(
    ("kernels", "computing"),
    [
        (BASELINE, "baseline kernels (decoder, attention, sampler), 1 threads"),
        (KernelsConfig(isa="baseline", decoder=False), "baseline kernels (linear, attention, sampler), 1 threads"),
    ],
    ids=["decoder", "linear"],
)
def test_linear_layers_keep_their_names_and_sizes_when_their_weights_are_gone(
    path: Path, kernels: KernelsConfig, computing: str
) -> None:
    model = load(path)

    def sizes() -> dict[str, tuple[int, int]]:
        found = {n: m for n, m in model.module.named_modules() if isinstance(m, torch.nn.Linear)}
        return {name: (linear.out_features, linear.in_features) for name, linear in found.items()}

    before = sizes()
    assert before["model.layers.0.mlp.up_proj"] == tuple(model.module.model.layers[0].mlp.up_proj.weight.shape)
    assert build(model, kernels).computing == computing
    assert sizes() == before
    assert model.module.model.layers[0].mlp.up_proj.weight.numel() == 0


@pytest.mark.parametrize("kernels", [BASELINE, KernelsConfig(isa="off")], ids=["decoder", "modules"])
def test_embedded_tokens_and_a_separate_head_give_the_logits_of_the_run(path: Path, kernels: KernelsConfig) -> None:
    model = load(path)
    forward = build(model, kernels).forward
    probe = Probe.prompt(model.vocab_size)
    forward.bind(forward.memory.throwaway(16, probe.num_blocks))
    rows = np.array([3, 23])
    with torch.inference_mode():
        plain = forward.run(ForwardBatch(probe.token_ids, probe.positions, [probe.metadata]), rows)
        embedded = forward.embed(probe.token_ids)
        batch = ForwardBatch(probe.token_ids, probe.positions, [probe.metadata], embedded)
        output = forward.run(batch, rows[:1], keep_states=True)
        assert forward.separate_head
        headed = forward.head(output.states, torch.from_numpy(rows))
    assert plain.states is None
    torch.testing.assert_close(output.logits, plain.logits[:1])
    torch.testing.assert_close(headed, plain.logits)


@pytest.mark.parametrize("kernels", [BASELINE, KernelsConfig(isa="off")], ids=["decoder", "modules"])
def test_a_forward_pass_lets_go_of_the_cache_it_was_bound_to(path: Path, kernels: KernelsConfig) -> None:
    forward = build(load(path), kernels).forward
    caches = forward.memory.throwaway(16, 2)
    keys = weakref.ref(next(iter(caches.values())).cache.keys)
    forward.bind(caches)
    del caches
    assert keys() is not None
    forward.bind({})
    assert keys() is None


def test_the_native_decoder_is_batch_invariant_and_reports_it_if_required(path: Path) -> None:
    built = build(load(path), KernelsConfig(isa="baseline", batch_invariant=True))
    assert built.computing == "baseline kernels (decoder, attention, sampler), 1 threads, batch invariant"


def test_batch_invariance_refuses_a_model_whose_experts_pytorch_computes(tmp_path: Path) -> None:
    save_tiny_model("llama4_text", tmp_path, hidden_size=64, intermediate_size=42)
    assert build(load(tmp_path), KernelsConfig(isa="baseline")).computing.startswith("baseline kernels (decoder,")
    with pytest.raises(
        ModelLoadError, match="Llama4ForCausalLM; PyTorch computes the model's experts; set kernels.batch"
    ):
        build(load(tmp_path), KernelsConfig(isa="baseline", batch_invariant=True))


def test_batch_invariance_refuses_a_model_without_a_decoder(tmp_path: Path) -> None:
    save_tiny_model("persimmon", tmp_path, hidden_size=64)
    said = "batch_invariant is true, but only the CPU kernels' decoder .* PersimmonForCausalLM; decoder not used: .*models.md"
    with pytest.raises(ModelLoadError, match=said):
        build(load(tmp_path), KernelsConfig(isa="baseline", batch_invariant=True))
