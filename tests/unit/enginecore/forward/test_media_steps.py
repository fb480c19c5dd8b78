"""Steps with media through forward passes of tiny models: against transformers' own forward of the same weights."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.forward.backbone import Backbone, BackboneBatch, probe_specs
from penstock_enginecore.forward.base import ChainedDraws, ForwardBatch, ForwardPass, MediaDemands, demands_of
from penstock_enginecore.forward.build import ForwardConfig, build_forward
from penstock_enginecore.forward.cuda.attention import TritonAttention
from penstock_enginecore.forward.cuda.decoder import FusedForward, fused_candidates
from penstock_enginecore.forward.cuda.graphs import StepGraphs
from penstock_enginecore.forward.cuda.media_steps import unsupported
from penstock_enginecore.forward.cuda.replayed_modules import ReplayedModules
from penstock_enginecore.forward.equivalence_check import distance
from penstock_enginecore.forward.modules import ModulesForward, probe_model
from penstock_enginecore.forward.native import NativeForward
from penstock_enginecore.forward.stage import StageConfig, cut
from penstock_enginecore.models.decoder_plan import LatentPlan
from penstock_enginecore.models.errors import ModelLoadError, UnsuitableError
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.pooling.config import PoolingConfig
from penstock_enginecore.pooling.embedder import PoolingModel
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.models.media_models import FAMILIES, MAX_LEN, VOCAB, FakeEncoder, make, spans_masks
from tests.fakes.models.recorded_launches import RecordedGraph, RecordedKernels
from tests.fakes.models.torch_kernels import TorchKernels

CPU = torch.device("cpu")
BLOCK, BLOCKS = 16, 5
ISAS = [isa for isa in runnable() if isa != "avx512_bf16"]
BUILDS = ["reference", "cpu", "triton", "replayed", "fused", *ISAS]
BUILDS_OF = [(family, name) for family in FAMILIES for name in BUILDS if (family, name) != ("gemma4", "fused")]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Prompt:
    """``rows`` stand for the tokens of ``images``, spans of tokens; tokens behind ``length`` are generated."""

    token_ids: IntArray
    images: Sequence[tuple[int, int]]
    rows: torch.Tensor
    deepstack: torch.Tensor
    rope: IntArray
    ends: IntArray
    length: int


def make_prompt(
    seed: int, length: int, images: Sequence[tuple[int, int]], generated: int, num_deepstack: int
) -> Prompt:
    generator = np.random.default_rng(seed)
    total = length + generated
    ids = generator.integers(1, VOCAB, total)
    rope = np.zeros((3, total), dtype=np.int64)
    ends = np.arange(total) + 1
    at = place = 0
    for start, end in [*images, (total, total)]:
        rope[:, at:start] = place + np.arange(start - at)
        place += start - at
        down, right = np.divmod(np.arange(end - start), 4)
        rope[:, start:end] = place + np.stack([0 * down, down, right])
        place = rope[:, start:end].max(initial=place - 1) + 1
        ends[start:end] = end
        at = end
    torch.manual_seed(seed)
    rows = torch.randn(total, 64)
    deepstack = torch.zeros(num_deepstack, total, 64)
    for start, end in images:
        deepstack[:, start:end] = torch.randn(num_deepstack, end - start, 64)
    return Prompt(ids, images, rows, deepstack, rope, ends, length)


def prompts(num_deepstack: int) -> list[Prompt]:
    return [
        make_prompt(1, 50, [(4, 20), (26, 44)], 4, num_deepstack),
        make_prompt(2, 31, [(0, 31)], 6, num_deepstack),
        make_prompt(3, 17, [], 5, num_deepstack),
    ]


def embedded_of(forward: ForwardPass | Backbone, prompt: Prompt, part: slice) -> torch.Tensor:
    embedded = forward.embed(prompt.token_ids[part])
    for start, end in prompt.images:
        first, last = max(start, part.start), min(end, part.stop)
        if first < last:
            embedded[first - part.start : last - part.start] = prompt.rows[first:last]
    return embedded


def expected_logits(family: str, model: LoadedModel, twin: Any, prompt: Prompt) -> torch.Tensor:
    """Return transformers' logits of all tokens."""
    demands = demands_of(model)
    with torch.inference_mode():
        embedded = twin.get_input_embeddings()(torch.from_numpy(prompt.token_ids)[None])
        for start, end in prompt.images:
            embedded[0, start:end] = prompt.rows[start:end]
        inputs: dict[str, Any] = {"inputs_embeds": embedded, "use_cache": False}
        if demands.sections:
            inputs["position_ids"] = torch.from_numpy(prompt.rope)[:, None]
        visual = torch.zeros(1, len(prompt.token_ids), dtype=torch.bool)
        groups = torch.full_like(visual, -1, dtype=torch.int64)
        for i, (start, end) in enumerate(prompt.images):
            visual[0, start:end], groups[0, start:end] = True, i
        if demands.num_deepstack:
            inputs["visual_pos_masks"] = visual
            inputs["deepstack_visual_embeds"] = [each[visual[0]] for each in prompt.deepstack]
        if family == "gemma3":
            inputs["attention_mask"] = spans_masks(twin, embedded, groups, windowed=demands.windowed_spans)
        if demands.layer_ids:
            ids = torch.from_numpy(prompt.token_ids)[None].masked_fill(visual, twin.config.pad_token_id)
            inputs["per_layer_inputs"] = twin.base_model.get_per_layer_inputs(ids)
        logits: torch.Tensor = twin(**inputs).logits[0]
        return logits


def batch_of(
    forward: ForwardPass | Backbone, model: LoadedModel, parts: Sequence[tuple[int, Prompt, slice]]
) -> ForwardBatch:
    """Return a step of ``parts``. Each part is a request's number, its prompt, and the tokens to compute."""
    demands = demands_of(model)
    counts = [part.stop - part.start for _, _, part in parts]
    table = np.stack([1 + index * BLOCKS + np.arange(BLOCKS, dtype=np.int32) for index, _, _ in parts])
    positions = np.concatenate([np.arange(part.start, part.stop) for _, _, part in parts])
    row = np.repeat(np.arange(len(parts)), counts)
    metadata = AttentionMetadata(
        query_start_loc=np.cumsum([0, *counts]),
        seq_lens=np.array([part.stop for _, _, part in parts]),
        block_table=table,
        slot_mapping=table[row, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
        block_size=BLOCK,
        key_ends=np.concatenate([p.ends[part] for _, p, part in parts]) if demands.spans else None,
        windowed_ends=demands.windowed_spans,
    )
    ids = np.concatenate([p.token_ids[part] for _, p, part in parts])
    has_images = any(first < part.stop and part.start < last for _, p, part in parts for first, last in p.images)
    batch = ForwardBatch(ids, positions, [metadata])
    if demands.sections:
        batch = replace(batch, rope_positions=np.concatenate([p.rope[:, part] for _, p, part in parts], axis=1))
    if has_images:
        embedded = torch.cat([embedded_of(forward, p, part) for _, p, part in parts])
        deepstack = torch.cat([p.deepstack[:, part] for _, p, part in parts], dim=1) if demands.num_deepstack else None
        inside = [any(first <= at < last for first, last in p.images) for _, p, part in parts for at in _range(part)]
        replaced = torch.tensor(inside).nonzero()[:, 0]
        batch = replace(batch, embedded=embedded, deepstack=deepstack, replaced=replaced)
    return batch


def _range(part: slice) -> range:
    return range(part.start, part.stop)


def kernels(isa: Any, **uses: Any) -> KernelsConfig:
    return KernelsConfig(isa=isa, **uses)


def build(model: LoadedModel, name: str) -> ForwardPass:
    if name in ISAS:
        forward = build_forward(model, ForwardConfig(CPU, "auto", kernels(name), 2, BLOCK)).forward
        assert isinstance(forward, NativeForward)
        return forward
    probed = probe_model(model, CPU, BLOCK)
    if name == "replayed":
        recorded = RecordedKernels()
        graphs = StepGraphs(lambda: RecordedGraph(recorded, of_modules=True))
        return ReplayedModules(probed, TritonAttention(recorded), graphs)
    if name == "fused":
        recorded = RecordedKernels()
        return FusedForward(probed, recorded, StepGraphs(lambda: RecordedGraph(recorded))).take_over()
    if name == "triton":
        return ModulesForward(probed, TritonAttention(TorchKernels()))
    return ModulesForward(probed, create_backend(name, CPU))


STEPS: list[list[tuple[int, int, int]]] = [
    [(0, 0, 4), (1, 0, 31)],
    [(0, 4, 26), (2, 0, 9), (1, 31, 32)],
    [(0, 26, 50), (2, 9, 17), (1, 32, 33)],
    *[[(0, 50 + i, 51 + i), (1, 33 + i, 34 + i), (2, 17 + i, 18 + i)] for i in range(4)],
]
"""Numbers of tokens by request: chunks inside images, images in batches with text and decodes, and decodes alone."""


@pytest.mark.each_value
@pytest.mark.parametrize(("family", "name"), BUILDS_OF)
def test_steps_give_the_logits_of_transformers(family: str, name: str) -> None:
    check_steps(family, *make(family), name)


@pytest.mark.parametrize("name", BUILDS)
def test_images_attend_both_ways_in_windowed_layers_only(name: str) -> None:
    model, twin = make("gemma3")
    model.encoder.windowed_spans = True  # type: ignore[union-attr]
    check_steps("gemma3", model, twin, name)


@pytest.mark.parametrize("isa", ISAS[:1])
@torch.inference_mode()
def test_images_between_segments_of_keys_attend_both_ways_in_windowed_layers_only(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels divide keys at position 2048. Only in layers with windows, the first queries of the image see later
    keys. All layers share one plan.
    """
    monkeypatch.setattr(sys.modules[__name__], "BLOCKS", 130)
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    model, twin = make("gemma3", max_position_embeddings=4096, num_hidden_layers=4, layer_types=kinds)
    model.encoder.windowed_spans = True  # type: ignore[union-attr]
    forward = build_forward(model, ForwardConfig(CPU, "auto", kernels(isa), 4, BLOCK)).forward
    assert isinstance(forward, NativeForward)
    forward.bind(forward.memory.throwaway(BLOCK, 1 + 130))
    prompt = make_prompt(1, 2070, [(2029, 2064)], 0, 0)
    expected = expected_logits("gemma3", model, twin, prompt)
    for start, end in [(0, 2029), (2029, 2064), (2064, 2070)]:
        batch = batch_of(forward, model, [(0, prompt, slice(start, end))])
        got = forward.run(batch, np.arange(end - start)).logits
        torch.testing.assert_close(got, expected[start:end], rtol=1e-3, atol=1e-3)


def check_steps(family: str, model: LoadedModel, twin: Any, name: str) -> None:
    forward = build(model, name)
    requests = prompts(demands_of(model).num_deepstack)
    expected = [expected_logits(family, model, twin, prompt) for prompt in requests]
    forward.bind(forward.memory.throwaway(BLOCK, 1 + BLOCKS * len(requests)))
    for step in STEPS:
        with torch.inference_mode():
            batch = batch_of(forward, model, [(i, requests[i], slice(start, end)) for i, start, end in step])
            got = forward.run(batch, np.arange(len(batch.token_ids))).logits
        want = torch.cat([expected[i][start:end] for i, start, end in step])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert got.argmax(1).tolist() == want.argmax(1).tolist()


@pytest.mark.parametrize("isa", ISAS)
@torch.inference_mode()
def test_rows_may_go_behind_all_layers(isa: str) -> None:
    model, twin = make("qwen3_vl")
    model.encoder.num_deepstack = 3  # type: ignore[union-attr]
    forward = build(model, isa)
    prompt = prompts(3)[0]
    expected = expected_logits("qwen3_vl", model, twin, prompt)
    forward.bind(forward.memory.throwaway(BLOCK, 1 + BLOCKS))
    batch = batch_of(forward, model, [(0, prompt, slice(0, 50))])
    for rows in (np.array([49, 13, 7]), np.arange(50)):
        embedded = embedded_of(forward, prompt, slice(0, 50))  # the kernels overwrite this array
        got = forward.run(replace(batch, embedded=embedded), rows).logits
        torch.testing.assert_close(got, expected[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["reference", *ISAS])
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "gemma4"])
def test_after_the_last_attention_only_rows_with_requested_logits_are_computed(family: str, name: str) -> None:
    model, twin = make(family)
    forward = build(model, name)
    prompt = prompts(demands_of(model).num_deepstack)[0]
    expected = expected_logits(family, model, twin, prompt)
    forward.bind(forward.memory.throwaway(BLOCK, 1 + BLOCKS))
    with torch.inference_mode():
        batch = batch_of(forward, model, [(0, prompt, slice(0, 50))])
        got = forward.run(batch, np.array([49, 13])).logits
    torch.testing.assert_close(got, expected[[49, 13]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "name"), [each for each in BUILDS_OF if each[0] in ("qwen2_vl", "qwen3_vl", "gemma3", "gemma4")]
)
@torch.inference_mode()
def test_what_media_bring_matters(family: str, name: str) -> None:
    """Check that media change the logits, as the other tests here assume."""
    model, _ = make(family)
    forward = build(model, name)
    prompt = prompts(demands_of(model).num_deepstack)[0]
    forward.bind(forward.memory.throwaway(BLOCK, 1 + BLOCKS))

    def run(**changes: Any) -> torch.Tensor:
        batch = replace(batch_of(forward, model, [(0, prompt, slice(0, 50))]), **changes)
        return forward.run(batch, np.arange(50)).logits.clone()

    with_all = run()
    demands = demands_of(model)
    if demands.sections:
        assert (with_all - run(rope_positions=None)).norm() > 0.05 * with_all.norm()
    if demands.num_deepstack:
        assert (with_all - run(deepstack=None)).norm() > 0.05 * with_all.norm()
    if demands.layer_ids:
        assert (with_all - run(replaced=None)).norm() > 0.05 * with_all.norm()
    if demands.spans:
        batch = batch_of(forward, model, [(0, prompt, slice(0, 50))])
        causal = [replace(each, key_ends=None) for each in batch.attention]
        assert (with_all - run(attention=causal)).norm() > 0.05 * with_all.norm()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_text_have_the_bits_that_they_have_where_media_are_named(family: str, isa: str) -> None:
    model, _ = make(family)
    forward = build(model, isa)
    prompt = prompts(0)[2]
    forward.bind(forward.memory.throwaway(BLOCK, 1 + BLOCKS * 3))
    with torch.inference_mode():
        named = batch_of(forward, model, [(2, prompt, slice(0, 17))])
        plain = ForwardBatch(named.token_ids, named.positions, [replace(named.attention[0], key_ends=None)])
        rows = np.arange(17)
        assert torch.equal(forward.run(named, rows).logits, forward.run(plain, rows).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_the_modules(family: str) -> None:
    kept = []
    for name in ("reference", ISAS[-1]):
        model, _ = make(family)
        forward = build(model, name)
        prompt = prompts(demands_of(model).num_deepstack)[0]
        forward.bind(forward.memory.throwaway(BLOCK, 1 + BLOCKS))
        forward.keep_hidden([1, 2, 3])
        with torch.inference_mode():
            output = forward.run(batch_of(forward, model, [(0, prompt, slice(0, 50))]), np.array([49]))
        assert output.hidden is not None
        kept.append(output.hidden)
    torch.testing.assert_close(kept[1], kept[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_steps_with_media_are_not_replayed_and_those_of_text_are(family: str) -> None:
    model, _ = make(family)
    forward = build(model, "replayed")
    assert isinstance(forward, ReplayedModules)
    prompt = prompts(0)[0]
    forward.bind(forward.memory.throwaway(BLOCK, 1 + BLOCKS))
    with torch.inference_mode():
        batch = batch_of(forward, model, [(0, prompt, slice(0, 20))])
        forward.run(batch, np.array([3]))
        launched = forward.graph_stats().launched
        assert (launched, forward.graph_stats().captured) == (1, 0)
        text = batch_of(forward, model, [(0, prompt, slice(20, 24))])
        assert (text.rope_positions is None) == (family == "gemma3")
        forward.run(replace(text, attention=[replace(text.attention[0], key_ends=None)]), np.array([3]))
        assert (forward.graph_stats().launched, forward.graph_stats().captured) == (2, 1)


@pytest.mark.parametrize("name", ["replayed", "fused"])
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
@torch.inference_mode()
def test_decodes_beside_images_are_replayed(family: str, name: str) -> None:
    model, twin = make(family)
    forward: Any = build(model, name)
    request = prompts(0)[0]
    expected = expected_logits(family, model, twin, request)
    forward.bind(forward.memory.throwaway(BLOCK, 1 + BLOCKS))
    forward.run(batch_of(forward, model, [(0, request, slice(0, 50))]), np.array([49]))
    for at in range(50, 54):
        batch = batch_of(forward, model, [(0, request, slice(at, at + 1))])
        batch = replace(batch, attention=[replace(batch.attention[0], key_ends=None)])
        if batch.rope_positions is not None:
            assert batch.rope_positions[0, 0] != batch.positions[0]
        got = forward.run(batch, np.array([0])).logits
        torch.testing.assert_close(got, expected[at : at + 1], rtol=1e-4, atol=1e-4)
    stats = forward.graph_stats()
    assert (stats.launched, stats.captured, stats.replays) == (2, 1, 3)


@torch.inference_mode()
def test_rotary_positions_behind_the_tables_of_the_fused_decoder_are_computed() -> None:
    model, twin = make("qwen2_vl")
    forward: Any = build(model, "fused")
    request = prompts(0)[2]
    request = replace(request, rope=request.rope + MAX_LEN)
    expected = expected_logits("qwen2_vl", model, twin, request)
    forward.bind(forward.memory.throwaway(BLOCK, 1 + BLOCKS))
    for part in (slice(0, 17), slice(17, 18)):
        got = forward.run(batch_of(forward, model, [(0, request, part)]), np.arange(part.stop - part.start)).logits
        torch.testing.assert_close(got, expected[part], rtol=1e-4, atol=1e-4)
    assert forward.graph_stats().captured == 0


def test_the_fused_decoder_names_media_inputs_that_it_does_not_support() -> None:
    plan: Any = FusedForward(probe_model(make("gemma3")[0], CPU, BLOCK), RecordedKernels())._plan
    latent = SimpleNamespace(attention=object.__new__(LatentPlan), norms_after=(None, None))
    for of, demands, told in (
        (plan, MediaDemands(sections=True, spans=True), ""),
        (plan, MediaDemands(layer_ids=True), "embeddings of token ids in each layer"),
        (plan, MediaDemands(num_deepstack=2), "embeddings added after the first layers and norms after its MLPs"),
        (
            SimpleNamespace(layers=[latent]),
            MediaDemands(spans=True),
            "images with bidirectional attention and latent attention",
        ),
    ):
        assert unsupported(of, demands) == told


def test_no_batch_invariant_fused_decoder_serves_media() -> None:
    for family, told in (
        ("qwen2_vl", "rotary positions in sections"),
        ("qwen3_vl", "rotary positions in sections and embeddings added after the first layers"),
        ("gemma3", "images with bidirectional attention"),
        ("gemma4", "embeddings of token ids in each layer"),
    ):
        probed = replace(probe_model(make(family)[0], CPU, BLOCK), device=torch.device("cuda"))
        [candidate] = fused_candidates(probed, KernelsConfig(batch_invariant=True), "auto")
        with pytest.raises(UnsuitableError, match=f"^for media, the model uses {told}, which no batch-invariant"):
            candidate.build()


def test_stages_refuse_rows_between_their_layers() -> None:
    links: Any = SimpleNamespace(num_stages=2, stage=0)
    with pytest.raises(
        ModelLoadError,
        match=r"executor.pipeline_parallel_size is 2, but .* cannot be split .*set executor.pipeline_parallel_size to 1, or",
    ):
        cut(probe_model(make("qwen3_vl")[0], CPU, BLOCK), StageConfig(links, (), 64, 4))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
@torch.inference_mode()
def test_stages_compute_of_an_image_what_the_whole_model_does(family: str, stage: int) -> None:
    """Compare stages as the check at their split does."""
    links: Any = SimpleNamespace(num_stages=2, stage=stage, is_first=stage == 0, is_last=stage == 1)
    left = cut(probe_model(make(family)[0], CPU, BLOCK), StageConfig(links, (), 64, 4))
    assert distance(left.run(ModulesForward(left.probed, create_backend("cpu", CPU))), left.expected) < 1e-4


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_backbone_gives_the_hidden_states_of_transformers(family: str, backend: str) -> None:
    model, twin = make(family)
    prompt = prompts(demands_of(model).num_deepstack)[0]
    twin.lm_head = torch.nn.Identity()
    expected = expected_logits(family, model, twin, prompt)[:50]
    base: Any = model.module.base_model
    pooled = PoolingModel(
        base, None, PoolingConfig("lasttoken"), (), torch.float32, torch.float32, MAX_LEN, VOCAB, is_encoder=False
    )
    specs = probe_specs(pooled, CPU, BLOCK)
    backbone = Backbone(pooled, specs, create_backend(backend, CPU), CPU)
    backbone.bind(backbone.memory.throwaway(BLOCK, 1 + BLOCKS))
    step = batch_of(backbone, model, [(0, prompt, slice(0, 50))])
    batch = BackboneBatch(
        token_ids=step.token_ids,
        positions=step.positions,
        token_types=np.zeros_like(step.token_ids),
        query_start_loc=step.attention[0].query_start_loc,
        attention=step.attention,
        embedded=step.embedded,
        rope_positions=step.rope_positions,
        deepstack=step.deepstack,
        replaced=step.replaced,
    )
    torch.testing.assert_close(backbone.run(batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("field", ["rope_positions", "deepstack", "key_ends"])
def test_a_chain_refuses_media(field: str) -> None:
    model, _ = make({"key_ends": "gemma3"}.get(field, "qwen3_vl"))
    forward = build(model, ISAS[-1])
    assert isinstance(forward, NativeForward)
    prompt = prompts(demands_of(model).num_deepstack)[0]
    forward.bind(forward.memory.throwaway(BLOCK, 1 + BLOCKS))
    batch = batch_of(forward, model, [(0, prompt, slice(0, 50))])
    if field == "deepstack":
        batch = replace(batch, rope_positions=None)
    draws = ChainedDraws(np.array([2]), np.zeros(1, dtype=np.float32), np.zeros((2, 1)), VOCAB)
    with pytest.raises(ValueError, match="chained steps do not support media"):
        forward.chain(batch, draws)


@pytest.mark.parametrize("shape", [(4, 50, 64), (2, 49, 64), (2, 50, 32)])
def test_rows_that_the_kernels_would_read_beyond_are_refused(shape: tuple[int, ...]) -> None:
    model, _ = make("qwen3_vl")
    forward = build(model, ISAS[-1])
    prompt = prompts(2)[0]
    forward.bind(forward.memory.throwaway(BLOCK, 1 + BLOCKS))
    batch = replace(batch_of(forward, model, [(0, prompt, slice(0, 50))]), deepstack=torch.zeros(shape))
    with pytest.raises(ValueError, match="the model has 3 layers"):
        forward.run(batch, np.array([49]))


@pytest.mark.parametrize(
    ("encoder", "reason"),
    [
        (
            FakeEncoder(has_sections=True, num_deepstack=0, both_ways=False),
            "rotary embedding does not support sections",
        ),
        (
            FakeEncoder(has_sections=False, num_deepstack=1, both_ways=False),
            "its layers do not add deepstack embeddings",
        ),
    ],
)
def test_a_model_that_would_take_media_for_something_else_is_refused(encoder: Any, reason: str) -> None:
    model, _ = make("llama")
    with pytest.raises(ModelLoadError, match=f"cannot serve LlamaModel with media: .*{reason}"):
        build_forward(replace(model, encoder=encoder), ForwardConfig(CPU, "auto", KernelsConfig(isa="off"), 1, BLOCK))


def test_kernels_that_leave_media_out_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at the start has an image, so a decoder that treats it as text is not used."""
    for family in ("qwen2_vl", "qwen3_vl", "gemma3"):
        model, _ = make(family)
        run = NativeForward.run

        def forgetful(self: NativeForward, batch: ForwardBatch, rows: IntArray, **kwargs: Any) -> Any:
            attention = [replace(each, key_ends=None) for each in batch.attention]
            batch = replace(batch, rope_positions=None, deepstack=None, attention=attention)
            return run(self, batch, rows, **kwargs)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(NativeForward, "run", forgetful)
            built = build_forward(model, ForwardConfig(CPU, "auto", kernels(ISAS[-1], linear=False), 1, BLOCK))
        assert isinstance(built.forward, ModulesForward)
