"""Adapters in the fused decoder and on replayed modules: the numbers of the modules, bits, slots and graphs."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.backbone import Backbone, BackboneBatch, probe_specs
from penstock_enginecore.forward.cuda import adapters as adapter_kernels
from penstock_enginecore.forward.cuda import decoder
from penstock_enginecore.forward.cuda.adapters import DeviceAdapters, adapted_modules, slot_modules, why_not
from penstock_enginecore.forward.cuda.attention import TritonAttention
from penstock_enginecore.forward.cuda.buffers import StepShape
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.graphs import StepGraphs
from penstock_enginecore.forward.cuda.replayed_modules import ReplayedModules
from penstock_enginecore.forward.dummy_inputs import blank_step
from penstock_enginecore.forward.modules import ModulesForward, probe_model
from penstock_enginecore.lora.adapter import AdaptedForward, LoraAdapter, LoraSegment, LowRankUpdate
from penstock_enginecore.lora.device_slots import Place, SlotLimits
from penstock_enginecore.lora.slot_copies import Pairs
from penstock_enginecore.models.errors import ModelLoadError, UnsuitableError
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.pooling.embedder import load_pooling_model
from tests.fakes.models.adapted_steps import (
    BLOCK_SIZE,
    BLOCKS_OF_A_REQUEST,
    adapted_step,
    linear_layers,
    random_adapter,
    random_prompts,
    step_logits,
)
from tests.fakes.models.fused_models import load_probed, prove, save_varied_model
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.pooling_models import VOCAB_SIZE, save_pooling_model
from tests.fakes.models.recorded_launches import RecordedGraph, RecordedKernels, Recorder
from tests.fakes.models.torch_kernels import TorchKernels

CPU = torch.device("cpu")
LIMITS = SlotLimits(max_loras=3, max_rank=16)
LENGTHS = (1, 5, 17, 30, 3, 22)
# Types with one product for q, k and v, with three products, with biases, scaled residuals, experts, a separate head,
# and latent attention.
FUSED = ("llama", "qwen2", "phi3", "gemma2", "granite", "qwen3_moe", "deepseek_v3")
MODULES = ("gpt_neox", "olmo2", "cohere2", "phi")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def reference(path: Path) -> ModulesForward:
    model = load_model(ModelConfig(path=str(path)), CPU, lambda line: None)
    return ModulesForward(probe_model(model, CPU, BLOCK_SIZE), create_backend("reference", CPU))


def fused(path: Path, limits: SlotLimits = LIMITS, *, batch_invariant: bool = False) -> FusedForward:
    """Return the fused forward pass with graphs that replay recorded steps."""
    probed, kernels = load_probed(path), RecordedKernels(batch_invariant=batch_invariant)
    graphs = StepGraphs(lambda: RecordedGraph(kernels, of_modules=True))
    proven = prove(probed, lambda: FusedForward(probed, kernels, graphs, limits))
    assert proven.serves is not None, proven.reasons
    return proven.serves


def replayed(path: Path, limits: SlotLimits = LIMITS) -> ReplayedModules:
    probed, kernels = load_probed(path), RecordedKernels()
    graphs = StepGraphs(lambda: RecordedGraph(kernels, of_modules=True))
    adapted = adapted_modules(probed.model.module, probed.model.dtype, CPU, limits, kernels)
    return ReplayedModules(probed, TritonAttention(kernels), graphs, adapted)


def layers_of(forward: ModulesForward, architecture: str) -> list[str]:
    """Return names of the linear layers that support adapters on the device.

    Experts and the ``kv_b_proj`` layers of latent attention do not support adapters.
    """
    names = [name for name, part in forward._module.named_modules() if isinstance(part, torch.nn.Linear)]
    hidden = ("mlp.", "kv_b_proj") if architecture in ("qwen3_moe", "deepseek_v3") else ()
    return [name for name in names if not any(part in name for part in hidden)]


QUICK = ("llama", "gpt_neox")
BUILT = [
    pytest.param(name, build, id=name, marks=[] if name in QUICK else pytest.mark.slow)
    for names, build in ((FUSED, fused), (MODULES, replayed))
    for name in names
]


@pytest.mark.parametrize(("architecture", "build"), BUILT)
def test_logits_of_a_mixed_batch_are_those_of_the_modules(
    architecture: str, build: Callable[[Path], Any], tmp_path: Path
) -> None:
    """The batch has prompts, pieces of prompts and decodes. Its steps are launched, captured and replayed. Ranks differ
    by layer.
    """
    save_varied_model(architecture, tmp_path)
    expected, forward = reference(tmp_path), build(tmp_path)
    assert isinstance(forward, AdaptedForward)
    layers = layers_of(expected, architecture)
    adapters = [
        random_adapter(
            expected._module, lambda name, seed=seed: 1 + (len(name) * seed) % 16, seed, layers=layers[skip:]
        )
        for seed, skip in ((1, 0), (2, 1), (3, 0))
    ]
    prompts = random_prompts(320, [None, *(adapter.digest for adapter in adapters)], LENGTHS)
    for each in (expected, forward):
        for adapter in adapters:
            each.add_adapter(adapter)
    for cuts in ((), (1, 2, 9, 10, 11), (1, 2, 9, 10, 11)):
        for got, wanted in zip(step_logits(forward, prompts, cuts), step_logits(expected, prompts, cuts), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_graphs_with_and_without_adapters_replay_what_they_captured(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    for forward in (fused(tmp_path), replayed(tmp_path)):
        expected = reference(tmp_path)
        adapters = [random_adapter(expected._module, 4, seed) for seed in (1, 2, 3)]
        for each in (expected, forward):
            for adapter in adapters:
                each.add_adapter(adapter)
            each.bind(each.memory.throwaway(BLOCK_SIZE, 1 + 4 * BLOCKS_OF_A_REQUEST))
        began = forward.graph_stats()
        for digests in ([None, 0, 1], [None, None, None], [2, 1, 0], [None, None, 1], [None, None, None]):
            prompts = random_prompts(320, [None if i is None else adapters[i].digest for i in digests], (5, 5, 5))
            prompts = [
                dataclasses.replace(prompts[0], digest=None if i is None else adapters[i].digest) for i in digests
            ]
            batch = adapted_step(prompts, [0, 0, 0], [1, 1, 1])
            got, wanted = (each.run(batch, np.arange(3)).logits for each in (forward, expected))
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
        stats = forward.graph_stats()
        assert (stats.replays - began.replays, stats.launched - began.launched, stats.captured) == (3, 2, 2)


class Noted(FusedForward):
    """Records the kernels that a step launches between the arrival of its inputs and its logits."""

    seen: list[tuple[Any, ...]]

    def _launch_all(self, step: Any) -> torch.Tensor:
        kernels = self._layers._kernels
        kernels.recorder = recorder = Recorder(None)
        try:
            with recorder:
                return super()._launch_all(step)
        finally:
            kernels.recorder = None
            self.seen = recorder.seen


@torch.inference_mode()
def test_launches_depend_on_the_shape_only_and_equal_plain_ones_without_adapters(tmp_path: Path) -> None:
    """Launches use the same memory, allocate nothing, and read nothing on the host."""
    save_varied_model("qwen2", tmp_path)
    probed = load_probed(tmp_path)
    bare = prove(probed, lambda: FusedForward(probed, RecordedKernels())).serves
    assert bare is not None
    forward = fused(tmp_path)
    forward._graphs = None
    adapters = [random_adapter(reference(tmp_path)._module, 3, seed) for seed in (1, 2)]
    seen: dict[str, list[list[tuple[Any, ...]]]] = {"bare": [], "none": [], "some": []}
    for each in (bare, forward):
        each.__class__ = Noted
        each.bind(each.memory.throwaway(BLOCK_SIZE, 1 + 4 * BLOCKS_OF_A_REQUEST))
    for adapter in adapters:
        forward.add_adapter(adapter)
    some = [each.digest for each in adapters]
    for kind, each, digests in (
        ("bare", bare, [None]),
        ("none", forward, [None]),
        ("none", forward, [None]),
        ("some", forward, [None, *some]),
        ("some", forward, some[1:]),
    ):
        prompts = random_prompts(320, digests, (2, 2, 2))
        each.run(adapted_step(prompts, [0] * 3, [1] * 3), np.arange(3))
        seen[kind].append(each.seen)
    assert seen["none"][0] == seen["none"][1]
    assert seen["some"][0] == seen["some"][1]

    def without_addresses(launches: list[tuple[Any, ...]]) -> list[Any]:
        return [[part[1] if isinstance(part, tuple) else part for part in launch] for launch in launches]

    assert without_addresses(seen["none"][0]) == without_addresses(seen["bare"][0])
    others = [launch for launch in seen["some"][0] if launch[0] != "add_low_rank"]
    assert [launch[0] for launch in others] == [launch[0] for launch in seen["none"][0]]
    assert len(seen["some"][0]) - len(others) == 4 * len(forward._plan.layers) + 1


class Interpreted(TorchKernels):
    """Adds adapters with the GPU kernels, and computes the rest with torch."""

    def add_low_rank(self, *args: Any) -> None:
        interpreted("triton", "penstock_enginecore.lora").add_low_rank(*args)


@pytest.mark.slow
def test_the_decoder_and_modules_with_the_kernels_that_gpus_run(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    assert why_not(Interpreted(), torch.float32, CPU) == ""
    probed, limits = load_probed(tmp_path), SlotLimits(2, 16)
    attends = TritonAttention(TorchKernels())
    adapted = adapted_modules(probed.model.module, probed.model.dtype, CPU, limits, Interpreted())
    modules = ModulesForward(probed, attends, adapted=adapted)
    expected = reference(tmp_path)
    adapters = [random_adapter(expected._module, lambda name: 1 + len(name) % 16, seed) for seed in (1, 2)]
    prompts = random_prompts(320, [None, *(each.digest for each in adapters)], (1, 5, 20))
    results = []
    for forward in (expected, modules):
        for adapter in adapters:
            forward.add_adapter(adapter)
        results.append(step_logits(forward, prompts, (3,)))
    forward = prove(again := load_probed(tmp_path), lambda: FusedForward(again, Interpreted(), None, limits)).serves
    assert forward is not None
    for adapter in adapters:
        forward.add_adapter(adapter)
    results.append(step_logits(forward, prompts, (3,)))
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_rows_without_an_adapter_have_the_bits_of_an_engine_without_any(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    prompts = random_prompts(320, [None, bytes(15) + b"\1"], (7, 12))
    plain = prove(probed := load_probed(tmp_path), lambda: FusedForward(probed, TorchKernels())).serves
    assert plain is not None
    forward = fused(tmp_path)
    forward.add_adapter(random_adapter(reference(tmp_path)._module, 4, 1))
    bare, adapted = step_logits(plain, [each.plain for each in prompts]), step_logits(forward, prompts)
    assert torch.equal(adapted[0], bare[0])
    assert not torch.allclose(adapted[1], bare[1], atol=0.1)
    assert all(
        torch.equal(one, other)
        for one, other in zip(step_logits(forward, [each.plain for each in prompts]), bare, strict=True)
    )


def test_an_adapter_s_rows_have_the_same_bits_alone_in_a_crowd_and_in_pieces(tmp_path: Path) -> None:
    """Uses batch-invariant kernels; kernels of adapters are always batch invariant."""
    save_varied_model("llama", tmp_path)
    forward = fused(tmp_path, batch_invariant=True)
    adapters = [random_adapter(reference(tmp_path)._module, rank, rank) for rank in (3, 16)]
    for adapter in adapters:
        forward.add_adapter(adapter)
    prompts = random_prompts(320, [None, *(each.digest for each in adapters)], LENGTHS)
    crowd = step_logits(forward, prompts)
    for other in (step_logits(forward, prompts, together=False), step_logits(forward, prompts, (1, 2, 9))):
        assert all(torch.equal(one, two) for one, two in zip(crowd, other, strict=True))


@pytest.mark.parametrize("build", [fused, replayed])
def test_more_adapters_than_slots_take_turns(build: Callable[..., Any], tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    expected, forward = reference(tmp_path), build(tmp_path, SlotLimits(max_loras=1, max_rank=8))
    adapters = [random_adapter(expected._module, 8, seed) for seed in range(1, 5)]
    for each in (expected, forward):
        for adapter in adapters:
            each.add_adapter(adapter)
    for adapter in [*adapters, *adapters[::-1]]:
        prompts = random_prompts(320, [None, adapter.digest], (3, 4))
        for got, wanted in zip(step_logits(forward, prompts), step_logits(expected, prompts), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    forward.remove_adapter(adapters[0].digest)
    with pytest.raises(LookupError, match="there is no adapter"):
        step_logits(forward, random_prompts(320, [adapters[0].digest], (3,)))
    with pytest.raises(KeyError):
        forward.remove_adapter(adapters[0].digest)
    forward.add_adapter(adapters[0])
    prompts = random_prompts(320, [adapters[0].digest], (3,))
    torch.testing.assert_close(step_logits(forward, prompts), step_logits(expected, prompts), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_the_head_alone_gives_the_logits_of_the_run(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    for forward in (fused(tmp_path), replayed(tmp_path)):
        adapters = [random_adapter(reference(tmp_path)._module, 3, seed, layers=["lm_head"]) for seed in (1, 2)]
        for adapter in adapters:
            forward.add_adapter(adapter)
        prompts = random_prompts(320, [adapters[0].digest, None, adapters[1].digest], (4, 5, 6))
        batch, rows = adapted_step(prompts, [0, 0, 0], [4, 5, 6]), np.arange(15)
        forward.bind(forward.memory.throwaway(BLOCK_SIZE, 1 + 3 * BLOCKS_OF_A_REQUEST))
        run = forward.run(batch, rows, keep_states=True)
        logits = run.logits.clone()
        for some in (rows, rows[[3, 4, 14]], rows[[14, 0, 6]]):
            torch.testing.assert_close(forward.head(run.states, torch.from_numpy(some)), logits[some])
            torch.testing.assert_close(forward.run(batch, some).logits, logits[some])


@pytest.mark.parametrize("family", ["bert", "llama"])
@torch.inference_mode()
def test_layers_of_pooled_models_have_what_plain_torch_adds(family: str, tmp_path: Path) -> None:
    save_pooling_model(family, tmp_path)
    checkpoint = ModelConfig(path=str(tmp_path), task="embed")
    found: list[torch.Tensor] = []
    pooled: list[torch.Tensor] = []
    for slots in (False, True):
        model = load_pooling_model(checkpoint, "embed", CPU, lambda line: None)
        specs, reads = probe_specs(model, CPU, BLOCK_SIZE), create_backend("reference", CPU)
        adapted = adapted_modules(model.module, model.dtype, CPU, LIMITS, TorchKernels()) if slots else None
        backbone = Backbone(model, specs, reads, CPU, adapted=adapted)
        layers = [name for name in linear_layers(model.module) if "pooler" not in name]
        adapters = [random_adapter(model.module, rank, rank, layers=layers) for rank in (2, 9)]
        for adapter in adapters:
            backbone.add_adapter(adapter)
        prompts = random_prompts(VOCAB_SIZE, [None, *(each.digest for each in adapters)], (7, 3, 12, 5))
        step = adapted_step(prompts, [0] * 4, [len(each.ids) for each in prompts])
        starts = step.attention[0].query_start_loc
        attention = [] if model.is_encoder else step.attention
        batch = BackboneBatch(
            step.token_ids,
            step.positions,
            np.zeros_like(step.token_ids),
            starts,
            attention=attention,
            segments=step.segments,
        )
        backbone.bind(backbone.memory.throwaway(BLOCK_SIZE, 1 + 4 * BLOCKS_OF_A_REQUEST))
        base = backbone.run(dataclasses.replace(batch, segments=()))
        states = backbone.run(batch)
        backbone.release_adapters()
        assert torch.equal(backbone.run(batch), states)
        first = step.segments[0].first
        assert torch.equal(states[:first], base[:first])
        assert not torch.allclose(states[first:], base[first:], atol=0.1)
        backbone.remove_adapter(adapters[0].digest)
        found.append(states)
        if family == "bert":
            pooled.append(_pooled(backbone, model.module, batch))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    if pooled:
        torch.testing.assert_close(*pooled, rtol=1e-4, atol=1e-4)


def _pooled(backbone: Backbone, module: Any, batch: BackboneBatch) -> torch.Tensor:
    """Return the result of a pooler with an adapter for a prompt's first token, which the pooler gets after the step."""
    adapter = random_adapter(module, 2, 7, layers=["pooler.dense"])
    backbone.add_adapter(adapter)
    base = backbone.run(dataclasses.replace(batch, segments=()))
    segments = (LoraSegment(adapter.digest, 0, len(batch.token_ids)),)
    assert torch.equal(backbone.run(dataclasses.replace(batch, segments=segments)), base), "no states depend on it"
    before = module.pooler(base[None])
    with backbone.classifying(adapter.digest):
        found: torch.Tensor = module.pooler(base[None])
    assert not torch.allclose(found, before, atol=0.1)
    with backbone.classifying(b""):
        assert torch.equal(module.pooler(base[None]), before)
    return found


@torch.inference_mode()
def test_steps_beyond_padded_shapes_have_adapters(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    adapter = random_adapter(reference(tmp_path)._module, 5, 1)
    prompts = random_prompts(320, [None, adapter.digest], [90] * 8)
    wanted = reference(tmp_path)
    wanted.add_adapter(adapter)
    expected = step_logits(wanted, prompts)
    for forward in (fused(tmp_path), replayed(tmp_path)):
        forward.add_adapter(adapter)
        for got, one in zip(step_logits(forward, prompts), expected, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_blank_steps_capture_what_steps_with_adapters_replay(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    forward, expected = fused(tmp_path), reference(tmp_path)
    for each in (forward, expected):
        each.bind(each.memory.throwaway(BLOCK_SIZE, 1 + 4 * BLOCKS_OF_A_REQUEST))
    newest = torch.zeros(8, dtype=torch.int32)
    before = forward.graph_stats()
    forward.run(*blank_step(4, 4, 1, BLOCK_SIZE, newest, adapted=True))
    assert forward.graph_stats().captured == 1
    adapter = random_adapter(expected._module, 5, 1)
    for each in (forward, expected):
        each.add_adapter(adapter)
    prompts = random_prompts(320, [adapter.digest], (2, 2, 2, 2))
    batch = adapted_step(prompts, [0] * 4, [1] * 4)
    got, wanted = (each.run(batch, np.arange(4)).logits for each in (forward, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert forward.graph_stats().replays == before.replays + 1


class Late:
    """Makes copies only when they are waited for, as may happen on a device."""

    def __init__(self) -> None:
        self.waiting: list[Pairs] = []

    def begin(self, pairs: Pairs) -> int:
        self.waiting.append(pairs)
        return len(self.waiting)

    def await_end(self, end: int) -> None:
        """Copies are done in their order."""
        for target, source in (pair for pairs in self.waiting[:end] for pair in pairs):
            target.copy_(source)
        self.waiting[:end] = [()] * end

    def finish(self) -> None:
        self.await_end(len(self.waiting))


def test_a_step_waits_for_the_copies_of_its_own_adapters() -> None:
    place, copies = Place({"one": (8, 12)}), Late()
    adapters = DeviceAdapters([place], SlotLimits(2, 4), torch.float32, CPU, TorchKernels(), copies)
    adapters.allocate()
    updates = [LowRankUpdate(torch.randn(2, 12), torch.randn(8, 2)) for _ in range(3)]
    for number, update in enumerate(updates):
        adapters.prepare(LoraAdapter(bytes([number]), {"one": update}))()
    assert len(copies.waiting) == 3, "each is copied ahead: none had a step yet"
    x = torch.randn(3, 12)
    for number in (2, 1, 0, 1, 2):
        out = torch.zeros(3, 8)
        with adapters.step([LoraSegment(bytes([number]), 0, 3)], (), StepShape(3, 1)):
            adapters.add_to(0, x, 1.0, out)
        torch.testing.assert_close(out, x @ updates[number].a.t() @ updates[number].b.t())
    out = torch.zeros(3, 8)
    adapters.add_to(0, x, 1.0, out)
    assert not out.any(), "outside of a step nothing is added"


def test_updates_of_other_layers_than_the_devices_are_refused(tmp_path: Path) -> None:
    save_varied_model("deepseek_v3", tmp_path)
    forward, module = fused(tmp_path), reference(tmp_path)._module
    name = "model.layers.0.self_attn.kv_b_proj"
    with pytest.raises(ValueError, match=f"{name} does not support LoRA adapters on this device"):
        forward.add_adapter(random_adapter(module, 2, 1, layers=[name]))
    name = "model.layers.0.self_attn.o_proj"
    with pytest.raises(ValueError, match=f"the update of {name} has rank 17; the limit is lora.max_lora_rank, 16"):
        forward.add_adapter(random_adapter(module, 17, 1, layers=[name]))
    update = LowRankUpdate(torch.zeros(2, 5), torch.zeros(5, 2))
    with pytest.raises(ValueError, match=rf"{name}: expected shapes \[rank, "):
        forward.add_adapter(LoraAdapter(b"1", {name: update}))
    without = prove(probed := load_probed(tmp_path), lambda: FusedForward(probed, TorchKernels())).serves
    assert without is not None
    with pytest.raises(ValueError, match="was built without adapter slots"):
        without.add_adapter(random_adapter(module, 2, 1))


def test_numbers_that_float16_does_not_hold_are_refused() -> None:
    adapters = DeviceAdapters([Place({"one": (8, 12)})], LIMITS, torch.float16, CPU, TorchKernels())
    update = LowRankUpdate(torch.full((1, 12), 1e5), torch.ones(8, 1))
    with pytest.raises(ValueError, match="exceed the range of float16"):
        adapters.prepare(LoraAdapter(b"1", {"one": update}))


def test_slots_that_do_not_fit_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    adapters = DeviceAdapters([Place({"one": (800, 1200)})], LIMITS, torch.float32, CPU, TorchKernels())
    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(ModelLoadError, match="max_lora_rank is 16, so adapter slots need 0.4 MiB on cpu"):
        adapters.allocate()


class Faulty(TorchKernels):
    """Adds adapters with a fault: to every row of ``out``, or too much."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def add_low_rank(self, x: Any, matrices: Any, tiles: Any, scratch: Any, scale: float, out: torch.Tensor) -> None:
        if self.fault == "compiler":
            raise RuntimeError("no such instruction")
        super().add_low_rank(x, matrices, tiles, scratch, 1.5 * scale if self.fault == "scale" else scale, out)
        if self.fault == "rows":
            out[0] += 1


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        (TorchKernels(), "^$"),
        (Faulty("scale"), "the output of the adapter kernels differs by 0.5"),
        (Faulty("rows"), "the adapter kernels change rows without an adapter"),
        (Faulty("compiler"), "the adapter kernels fail: RuntimeError: no such instruction"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_are_proved_before_they_serve(kernels: Any, said: str, dtype: torch.dtype) -> None:
    assert re.search(said, why_not(kernels, dtype, CPU))


def test_without_proved_kernels_plain_torch_adds_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_varied_model("llama", tmp_path)
    probed = load_probed(tmp_path)
    model, gpu = (probed.model.module, probed.model.dtype), torch.device("cuda")
    assert slot_modules(*model, CPU, LIMITS) is None
    assert slot_modules(*model, gpu, None) is None
    assert not caplog.messages
    monkeypatch.setattr(adapter_kernels, "_kernels", lambda: Faulty("compiler"))
    assert slot_modules(*model, gpu, LIMITS) is None
    assert (
        "computing LoRA adapters with PyTorch instead of Penstock's GPU kernels (slower) reason=the adapter kernels fail"
        in caplog.text
    )

    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(adapter_kernels, "_kernels", missing)
    assert slot_modules(*model, gpu, LIMITS) is None
    assert "(slower) reason=kernels cannot be compiled: No module named 'triton'" in caplog.text
    monkeypatch.setattr(decoder, "why_not", lambda *_: "the adapter kernels fail")
    with pytest.raises(UnsuitableError, match="the adapter kernels fail"):
        decoder._build(probed, KernelsConfig(graphs=False), LIMITS)
    assert isinstance(decoder._build(probed, KernelsConfig(graphs=False), None), FusedForward)
