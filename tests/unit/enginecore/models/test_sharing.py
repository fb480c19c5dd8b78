"""Layers that share keys and values read the cache of the layer that writes it, and write nothing themselves."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock_enginecore.attention.base import AttentionMetadata, AttentionParams
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import FLOAT8, KVScales
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.cuda.decoder import fused_candidates
from penstock_enginecore.forward.equivalence_check import distance
from penstock_enginecore.forward.modules import ModulesForward, ProbedModel, caches_by_module, probe_model
from penstock_enginecore.forward.stage import StageConfig, cut
from penstock_enginecore.models import attention_hook
from penstock_enginecore.models.attention_hook import AttentionCall, StepContext
from penstock_enginecore.models.errors import ModelLoadError, UnsuitableError
from penstock_enginecore.models.loader import LoadedModel, load_model
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model, tiny_config

CPU = torch.device("cpu")
BLOCK = 4
DONORS = {f"model.layers.{reader}.self_attn": f"model.layers.{donor}.self_attn" for reader, donor in ((3, 2), (4, 1))}


@pytest.fixture(params=["gemma3n", "gemma4_shared"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    save_tiny_model(request.param, tmp_path)
    return tmp_path


def load(path: Path) -> LoadedModel:
    return load_model(ModelConfig(path=str(path)), CPU, lambda line: None)


def test_only_layers_with_own_keys_have_a_cache_and_the_others_read_the_last_layer_of_their_type(path: Path) -> None:
    probed = probe_model(load(path), CPU, BLOCK)
    assert list(probed.specs) == [f"model.layers.{index}.self_attn" for index in range(3)]
    assert probed.donors == DONORS


def test_scales_of_layers_without_a_cache_are_ignored(path: Path) -> None:
    model = load(path)
    scales = {f"model.layers.{index}.self_attn": KVScales(2.0, 3.0) for index in range(5)}
    object.__setattr__(model, "kv_scales", scales)
    assert list(probe_model(model, CPU, BLOCK, FLOAT8).specs) == list(scales)[:3]
    object.__setattr__(model, "kv_scales", {**scales, "model.layers.5.self_attn": KVScales()})
    with pytest.raises(
        ModelLoadError, match=r"has scales for model\.layers\.5\.self_attn, which is not an attention layer"
    ):
        probe_model(model, CPU, BLOCK, FLOAT8)


def test_keys_in_the_files_that_a_layer_does_not_use_are_accepted(path: Path) -> None:
    """Published checkpoints have key and value projections for all layers."""
    made: Any = AutoModelForCausalLM.from_pretrained(path)
    attention = made.model.layers[4].self_attn
    for name in ("k_proj", "v_proj"):
        setattr(attention, name, torch.nn.Linear(48, 64, bias=False))
    attention.k_norm = torch.nn.LayerNorm(16, bias=False)
    made.save_pretrained(path)
    assert probe_model(load(path), CPU, BLOCK).donors == DONORS


def test_the_fused_decoder_refuses_a_reader_by_name(path: Path) -> None:
    probed = replace(probe_model(load(path), CPU, BLOCK), device=torch.device("cuda"))
    [candidate] = fused_candidates(probed, KernelsConfig(), "auto")
    reader, donor = next(iter(DONORS.items()))
    with pytest.raises(UnsuitableError, match=f"^{reader} reads the keys and values of {donor}; the fused"):
        candidate.build()


def without_layer_embeddings() -> ProbedModel:
    config = tiny_config("gemma4_shared", hidden_size_per_layer_input=0)
    attention_hook.register()
    torch.manual_seed(0)
    module: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention_hook.ATTENTION_NAME).eval()
    model = LoadedModel(module, torch.float32, torch.float32, 512, VOCAB_SIZE, frozenset())
    return probe_model(model, CPU, 16)


def stage_of(stage: int, layers: tuple[int, int]) -> StageConfig:
    links: Any = SimpleNamespace(num_stages=2, stage=stage, is_first=stage == 0, is_last=stage == 1)
    return StageConfig(links, layers, 64, 4)


@pytest.mark.parametrize("stage", [0, 1])
@torch.inference_mode()
def test_a_stage_may_have_a_reader_together_with_its_donor(stage: int) -> None:
    left = cut(without_layer_embeddings(), stage_of(stage, (1, 4)))
    assert left.probed.donors == (DONORS if stage else {})
    assert distance(left.run(ModulesForward(left.probed, create_backend("cpu", CPU))), left.expected) < 1e-4


@torch.inference_mode()
def test_a_stage_without_the_donor_of_its_reader_is_refused() -> None:
    with pytest.raises(
        ModelLoadError,
        match=r"executor.pipeline_parallel_size is 2, but layer 'model.layers.3.self_attn' of Gemma4ForCausalLM reads the "
        r"keys and values of 'model.layers.2.self_attn', which another stage computes; change executor.stage_layers",
    ):
        cut(without_layer_embeddings(), stage_of(1, (3, 2)))


class Step:
    """One step of a reader and its donor, over three tokens that the cache has already."""

    def __init__(self, path: Path) -> None:
        probed = probe_model(load(path), CPU, BLOCK)
        modules = dict(probed.model.module.named_modules())
        self.reader, self.donor = (modules[name] for name in next(iter(DONORS.items())))
        backend = create_backend("reference", CPU)
        caches = backend.memory(probed.specs, torch.float32, CPU).throwaway(BLOCK, 3)
        by_module = caches_by_module(probed.model.module, caches, probed.donors)
        self.cache = by_module[self.reader].cache
        assert self.cache is by_module[self.donor].cache
        assert (by_module[self.reader].read_only, by_module[self.donor].read_only) == (True, False)
        self.cache.keys[BLOCK:].normal_()
        self.cache.values[BLOCK:].normal_()
        table, slots = np.array([[1]], dtype=np.int32), np.array([BLOCK + 3])
        metadata = AttentionMetadata(np.array([0, 1]), np.array([4]), table, slots, BLOCK)
        self.context = StepContext(backend, by_module, [backend.plan(metadata, CPU)])

    def attend(self, module: torch.nn.Module, key: torch.Tensor, num_queries: int = 1) -> torch.Tensor:
        query = torch.ones(num_queries, 4, 16)
        return self.context.attend(AttentionCall(module, query, key, key, AttentionParams(1.0), None, {}))


def test_a_reader_writes_nothing_and_reads_all_tokens_of_its_donors_cache(path: Path) -> None:
    step, key = Step(path), torch.randn(1, 2, 16)
    step.cache.keys[BLOCK + 3] = torch.nan
    step.attend(step.donor, key)
    kept = [tensor.clone() for tensor in (step.cache.keys, step.cache.values)]
    output = step.attend(step.reader, torch.full_like(key, torch.nan))
    assert all(map(torch.equal, kept, (step.cache.keys, step.cache.values)))
    torch.testing.assert_close(output, step.attend(step.donor, key))


def test_a_model_that_computes_a_reader_for_some_tokens_only_fails(path: Path) -> None:
    step = Step(path)
    with pytest.raises(RuntimeError, match="has 1 queries for 2 tokens: the model dropped tokens of the step"):
        step.attend(step.reader, torch.randn(2, 2, 16))
