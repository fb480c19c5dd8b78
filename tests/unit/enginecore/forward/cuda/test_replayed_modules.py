"""Whole steps of transformers' modules, captured and replayed: their launches depend only on the step's shape."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.forward.build import BuiltForward, ForwardConfig, build_forward
from penstock_enginecore.forward.cuda import attention
from penstock_enginecore.forward.cuda.attention import TritonAttention
from penstock_enginecore.forward.cuda.graphs import StepGraphs
from penstock_enginecore.forward.cuda.replayed_modules import ReplayedModules
from penstock_enginecore.forward.cuda.sampler import DeviceLauncher
from penstock_enginecore.models.loader import load_model
from tests.fakes.models.fused_models import load_probed
from tests.fakes.models.recorded_launches import RecordedGraph, RecordedKernels, RecordedSampling, Recorder
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.models.torch_sampling import TorchSampling
from tests.unit.enginecore.forward.cuda.test_capture_safety import BLOCK_SIZE, NEWEST, decodes, mixed

CPU = torch.device("cpu")
# A query scale and chunks, windows, latent attention and experts, sinks, one head for all, learned positions.
FAMILIES = ("llama4_text", "cohere2", "deepseek_v3", "gpt_oss", "gpt_bigcode", "opt", "gpt2")


class Spied(ReplayedModules):
    """Records the kernels that a step launches between the arrival of its inputs and its logits."""

    recorder: Recorder

    def _launch(self, inputs: Any, shape: Any) -> torch.Tensor:
        kernels, feedback = self._attention._kernels, self._feedback
        caches = [part for layer in self._caches.values() for part in (layer.cache.keys, layer.cache.values)]
        room = self._logits_like(torch.empty(1, 320))
        static = [room, inputs.token_ids, inputs.fed.ids, feedback._results, feedback._peaks, feedback._newest, *caches]
        kernels.recorder = self.recorder = Recorder(static, may_allocate=True, may_copy=True)
        try:
            with self.recorder:
                return super()._launch(inputs, shape)
        finally:
            kernels.recorder = None


class Idle:
    """A graph that does nothing."""

    def capture(self, launch: Any) -> torch.Tensor:
        return torch.empty(0)

    def replay(self) -> None:
        raise AssertionError("replayed a step that was not captured")


def replayed(path: Path, architecture: str) -> ReplayedModules:
    save_tiny_model(architecture, path)
    kernels = RecordedKernels()
    graphs = StepGraphs(lambda: RecordedGraph(kernels, of_modules=True))
    forward = ReplayedModules(load_probed(path), TritonAttention(kernels), graphs)
    forward.choose_by(RecordedSampling(512, 320, CPU))
    return forward


@pytest.mark.parametrize("architecture", FAMILIES)
@torch.inference_mode()
def test_steps_of_one_shape_launch_the_same_work_on_the_same_memory(architecture: str, tmp_path: Path) -> None:
    forward = replayed(tmp_path, architecture)
    forward.__class__, forward._graphs = Spied, StepGraphs(Idle)
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 64))
    seen = []
    for batch, rows in (decodes([1, 33, 7], 0), decodes([60, 2, 40, 19], 1), mixed(0), mixed(1)):
        forward._graphs.clear()
        forward.run(batch, rows)
        seen.append(forward.recorder.seen)
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[0] != seen[2]
    names = [operation[0] for operation in seen[0]]
    assert names[-2:] == ["sample", "index_copy_"]
    assert names.count("attend") == names.count("write") == len(forward.specs)


@torch.inference_mode()
def test_replayed_steps_have_the_logits_and_tokens_of_launched_ones(tmp_path: Path) -> None:
    forward = replayed(tmp_path, "llama4_text")
    forward.bind(caches := forward.memory.throwaway(BLOCK_SIZE, 64))
    for part in (part for layer in caches.values() for part in (layer.cache.keys, layer.cache.values)):
        part.normal_()
    forward.run(*decodes([9, 9, 9], 5))
    batch, rows = decodes([60, 2, 40], 1)
    ids = torch.from_numpy(batch.token_ids.copy())
    ids[torch.from_numpy(batch.fed.places)] = NEWEST[torch.from_numpy(batch.fed.rows)].long()
    output = forward.run(batch, rows)
    assert forward.graph_stats() == GraphStats(
        captured=1, replays=1, launched=1, tokens=4, padding_tokens=1, padding_rows=1
    )
    found, chosen = output.logits.clone(), output.launched.token_ids.clone()
    assert torch.equal(NEWEST[torch.from_numpy(batch.choice.kept_rows)], chosen)
    whole = dataclasses.replace(batch, token_ids=ids.numpy(), fed=None)
    expected = forward._modules.run(whole, rows).logits
    torch.testing.assert_close(found, expected)
    launcher = DeviceLauncher(320, CPU, TorchSampling)
    assert torch.equal(launcher.launch(found, batch.choice.draws).token_ids, chosen)


@torch.inference_mode()
def test_what_is_not_padded_is_launched_by_the_modules(tmp_path: Path) -> None:
    forward = replayed(tmp_path, "olmo2")
    caches = forward.memory.throwaway(BLOCK_SIZE, 64)
    for layer in caches.values():  # earlier tokens were not computed, so their memory has arbitrary values
        layer.cache.keys.zero_()
        layer.cache.values.zero_()
    forward.bind(caches)
    batch, rows = decodes([60, 2, 40], 1)
    kept = forward.run(batch, rows, keep_states=True)
    assert kept.launched is None
    torch.testing.assert_close(forward.head(kept.states, torch.arange(3)), kept.logits)
    vectors = dataclasses.replace(batch, fed=None, embedded=forward.embed(batch.token_ids))
    assert forward.run(vectors, rows).launched is None
    assert forward.graph_stats() == GraphStats(launched=2)
    with pytest.raises(RuntimeError, match="bind must be called before"):
        replayed(tmp_path, "olmo2").run(batch, rows)


def build(path: Path, monkeypatch: pytest.MonkeyPatch, **uses: Any) -> BuiltForward:
    """Return the forward pass that is chosen where steps can be captured."""
    kernels = RecordedKernels()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(attention, "_kernels", lambda: kernels)
    monkeypatch.setattr(attention, "can_capture", lambda device: True)
    graphs = StepGraphs(lambda: RecordedGraph(kernels, of_modules=True))
    monkeypatch.setattr(attention, "make_graphs", lambda: graphs)
    model = load_model(ModelConfig(path=str(path)), CPU, lambda line: None)
    config = ForwardConfig(CPU, "triton", KernelsConfig(isa="off", **uses), num_threads=1, block_size=16)
    return build_forward(model, config)


def test_they_serve_once_they_are_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("cohere2", tmp_path)
    built = build(tmp_path, monkeypatch)
    assert built.computing == "Triton attention in graphs"
    assert built.graphs().replays == 2
    without = build(tmp_path, monkeypatch, graphs=False)
    assert (without.computing, without.graphs) == ("Triton attention", None)


def test_a_module_that_cannot_be_captured_is_named_and_its_model_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model("jetmoe", tmp_path)
    with caplog.at_level(logging.INFO):
        built = build(tmp_path, monkeypatch)
    assert built.computing == "Triton attention"
    assert built.graphs is None
    module = "model.layers.0.self_attention.experts.router: tolist reads on the host"
    assert any(f"Triton attention in graphs not used: RuntimeError: {module}" in line for line in caplog.messages)


def test_graphs_that_compute_something_else_are_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("olmo2", tmp_path)
    monkeypatch.setattr(RecordedGraph, "replay", lambda self: None)
    assert build(tmp_path, monkeypatch).computing == "Triton attention"
