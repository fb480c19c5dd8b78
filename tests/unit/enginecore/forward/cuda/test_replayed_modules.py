"""Whole steps of transformers' modules, captured and replayed: their launches depend only on the step's shape."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.executor.generation.graph_capture import GraphCapture, NewestTokens
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.build import BuiltForward, ForwardConfig, build_forward
from penstock_enginecore.forward.cuda import attention
from penstock_enginecore.forward.cuda.attention import TritonAttention
from penstock_enginecore.forward.cuda.buffers import StepShape
from penstock_enginecore.forward.cuda.graphs import StepGraphs
from penstock_enginecore.forward.cuda.replayed_modules import ReplayedModules
from penstock_enginecore.forward.cuda.sampler import DeviceLauncher
from penstock_enginecore.forward.cuda.states import open_kernels
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.states.base import StateMetadata
from penstock_enginecore.states.core.spec import SPAN, StatePoolConfig, StateStep
from penstock_enginecore.states.cuda import context
from penstock_enginecore.states.memory import StateLayer
from tests.fakes.models.fused_models import load_probed
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.recorded_launches import RecordedGraph, RecordedKernels, RecordedSampling, Recorder
from tests.fakes.models.recorded_states import RecordedStates
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.models.torch_sampling import TorchSampling
from tests.unit.enginecore.forward.cuda.test_capture_safety import BLOCK_SIZE, NEWEST, decodes, mixed

CPU = torch.device("cpu")
# A query scale and chunks, windows, latent attention and experts, sinks, one head for all, learned positions.
FAMILIES = ("llama4_text", "cohere2", "deepseek_v3", "gpt_oss", "gpt_bigcode", "opt", "gpt2")


class Spied(ReplayedModules):
    """Records the kernels that a step launches between the arrival of its inputs and its logits."""

    recorder: Recorder
    static: Sequence[torch.Tensor] = ()

    def _launch(self, inputs: Any, shape: Any, indices: Any) -> torch.Tensor:
        kernels, feedback = self._attention._kernels, self._feedback
        caches = [part for layer in self._caches.values() for part in (layer.cache.keys, layer.cache.values)]
        room = self._logits_like(torch.empty(1, 320))
        static = [
            *self.static,
            room,
            inputs.token_ids,
            inputs.fed.ids,
            feedback._results,
            feedback._peaks,
            feedback._newest,
            *caches,
        ]
        kernels.recorder = self.recorder = Recorder(static, may_allocate=True, may_copy=True)
        try:
            with self.recorder:
                return super()._launch(inputs, shape, indices)
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
        captured=1, captures=1, replays=1, launched=1, tokens=4, padding_tokens=1, padding_rows=1
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


# Models with recurrent layers.

SMALL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
POOL = StatePoolConfig(num_slots=41, num_requests=20, rows_per_request=SPAN, interval=SPAN)


@pytest.fixture
def recurrent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BuiltForward]:
    """Return a function that builds a tiny model. Its state kernels run in the interpreter, and its others in torch."""
    states = interpreted("triton_kernels", "penstock_enginecore.states.cuda").TritonStateKernels()
    monkeypatch.setattr(attention, "open_kernels", lambda specs: RecordedStates(attention._kernels(), states))

    def make(architecture: str, **uses: Any) -> BuiltForward:
        save_tiny_model(architecture, tmp_path, **(SMALL if architecture == "qwen3_5" else {}))
        return build(tmp_path, monkeypatch, **uses)

    return make


def with_states(step: tuple[ForwardBatch, Any], seed: int) -> tuple[ForwardBatch, Any]:
    """Return ``step`` with random rings and slots for its requests."""
    batch, rows = step
    numbers = np.random.default_rng(seed).permutation(18)
    of = StateMetadata.alone(batch.attention[0].query_start_loc, batch.attention[0].seq_lens)
    sequences = []
    for each, number in zip(of.sequences, numbers, strict=False):
        own = 2 * int(number) + 1
        writes = [(end, own + 1) for end, _ in each.state.writes]
        state = StateStep(int(number), own if each.base else 0, writes)
        sequences.append(dataclasses.replace(each, state=state))
    return dataclasses.replace(batch, states=StateMetadata(sequences)), rows


def poisoned(forward: Any) -> dict[str, StateLayer]:
    """Bind states that are zero where a request may read them, and NaN in the last two rings and slots."""
    layers = forward.states.allocate(POOL)
    for layer in layers.values():
        for tensor in layer.tensors():
            tensor.zero_()
            tensor[-2:] = torch.nan
    forward.bind_states(layers)
    return layers


@pytest.mark.parametrize("architecture", ["qwen3_5", "granitemoehybrid", "lfm2"])
def test_recurrent_models_are_replayed(architecture: str, recurrent: Callable[..., BuiltForward]) -> None:
    built = recurrent(architecture)
    assert built.computing == "Triton attention and states in graphs"
    assert built.graphs().replays > 0


def test_recurrent_layers_with_other_results_are_refuted(
    recurrent: Callable[..., BuiltForward], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    convolve = RecordedStates.convolve
    monkeypatch.setattr(RecordedStates, "convolve", lambda *args, activated: convolve(*args, activated=not activated))
    with caplog.at_level(logging.INFO):
        assert recurrent("lfm2").computing == "Triton attention"
    line = next(line for line in caplog.messages if line.startswith("computing with"))
    assert "; Triton attention and states in graphs not used: its results differ by" in line
    assert "; Triton attention and states not used: its results differ by" in line


def test_recurrent_layers_of_unsupported_sizes_run_on_torch(
    recurrent: Callable[..., BuiltForward], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "open_kernels", open_kernels)
    monkeypatch.setattr(context, "MAX_KEY_SIZE", 4)
    with caplog.at_level(logging.INFO):
        assert recurrent("qwen3_5").computing == "Triton attention"
    reason = "model.layers.0.linear_attn: its states have 8 rows per head, but the kernels support at most 4"
    assert any(f"Triton attention and states not used: {reason}" in line for line in caplog.messages)


@torch.inference_mode()
def test_recurrent_steps_of_one_shape_launch_the_same_work_on_the_same_memory(
    recurrent: Callable[..., BuiltForward],
) -> None:
    forward: Any = recurrent("qwen3_5").forward
    forward.__class__, forward._graphs = Spied, StepGraphs(Idle)
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 64))
    layers = poisoned(forward)
    forward.static = [each for layer in layers.values() for each in layer.tensors()]
    forward.static.append(forward._state_buffers._broken)
    seen = []
    for seed, batch in enumerate((decodes([1, 33, 7], 0), decodes([60, 2, 40, 19], 1), mixed(0), mixed(1))):
        forward._graphs.clear()
        forward.run(*with_states(batch, seed))
        seen.append(forward.recorder.seen)
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    names = [operation[0] for operation in seen[0]]
    assert names.count("convolve") == names.count("scan") == len(layers)


@torch.inference_mode()
def test_padding_touches_no_states(recurrent: Callable[..., BuiltForward]) -> None:
    built = recurrent("qwen3_5")
    forward: Any = built.forward
    caches = forward.memory.throwaway(BLOCK_SIZE, 64)
    for layer in caches.values():
        layer.cache.keys.zero_()
        layer.cache.values.zero_()
    forward.bind(caches)
    layers = poisoned(forward)
    for count, (step, seed) in enumerate(((decodes([1, 33, 7], 0), 3), (decodes([17, 34, 8], 1), 3), (mixed(0), 4))):
        batch, rows = with_states((dataclasses.replace(step[0], fed=None, choice=None), step[1]), seed)
        before = {name: [each.clone() for each in layer.tensors()] for name, layer in layers.items()}
        expected = forward._modules.run(batch, rows).logits.clone()
        for name, layer in layers.items():
            for tensor, old in zip(layer.tensors(), before[name], strict=True):
                tensor.copy_(old)
        batch.states.flags.clear()
        output = forward.run(batch, rows)
        torch.testing.assert_close(output.logits, expected)
        assert [flags.tolist() for flags in batch.states.flags] == [[0, 0, 0]]
        rings = {each.state.rows for each in batch.states.sequences}
        slots = {slot for each in batch.states.sequences for _, slot in each.state.writes}
        for name, layer in layers.items():
            for tensor, old in zip(layer.tensors(), before[name], strict=True):
                changed = {
                    index
                    for index in range(len(tensor))
                    if not torch.equal(tensor[index].nan_to_num(7e8), old[index].nan_to_num(7e8))
                }
                assert changed == (slots if len(tensor) == POOL.num_slots else rings), (count, name)
    assert built.graphs().padding_tokens > 0


@torch.inference_mode()
def test_capture_before_the_first_request_touches_no_states(recurrent: Callable[..., BuiltForward]) -> None:
    built = recurrent("qwen3_5")
    forward: Any = built.forward
    capture = GraphCapture.of(built, NewestTokens(CPU))
    assert capture is not None
    assert capture.measure([StepShape(4, 4), StepShape(1, 1)], BLOCK_SIZE, lambda: 1000) == 0
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 8))
    layers = poisoned(forward)
    before = {name: [each.clone() for each in layer.tensors()] for name, layer in layers.items()}
    capture.run([StepShape(4, 4), StepShape(1, 1)], 1, BLOCK_SIZE, lambda: 1000)
    assert built.graphs().captured == 2
    for name, layer in layers.items():
        for tensor, old in zip(layer.tensors(), before[name], strict=True):
            assert torch.equal(tensor.nan_to_num(7e8), old.nan_to_num(7e8)), name
    forward.bind_states(forward.states.allocate(POOL))
    assert built.graphs().captured == 0


@torch.inference_mode()
def test_a_step_without_the_states_that_a_model_needs_is_refused(recurrent: Callable[..., BuiltForward]) -> None:
    forward: Any = recurrent("lfm2").forward
    forward.bind(forward.memory.throwaway(BLOCK_SIZE, 64))
    poisoned(forward)
    with pytest.raises(RuntimeError, match="the step has no states for the model's recurrent layers"):
        forward.run(*decodes([9], 0))
