"""Model loading: creates the runner for a checkpoint and its task, and refuses settings that do not fit."""

import gc
import logging
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import torch
from transformers import PreTrainedModel

from penstock_common.errors import ConfigError
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import FLOAT8, LayerCaches
from penstock_enginecore.config import EngineCoreConfig, KernelsConfig, LoraConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import DraftTokenIds, GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.data_parallel.core.group_channels import SharedExperts
from penstock_enginecore.executor.generation.graph_capture import GraphCapture
from penstock_enginecore.executor.generation.runner import GenerationRunner, StageRunner
from penstock_enginecore.executor.pooling_runner import PoolingRunner
from penstock_enginecore.experts.group_experts import GroupExperts
from penstock_enginecore.experts.layer import SpreadExperts, dispatched_layers
from penstock_enginecore.experts.loading import ExpertReader, SharedModel, check_shared
from penstock_enginecore.forward.build import ForwardConfig, build_backbone, build_forward, build_stage
from penstock_enginecore.forward.cuda.decoder import kept_weights
from penstock_enginecore.forward.equivalence_check import SpentError
from penstock_enginecore.forward.stage import StageConfig
from penstock_enginecore.lora.adapter import AdaptedForward
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.lora.store import Onlooker
from penstock_enginecore.media.towers import check_towers
from penstock_enginecore.models.checkpoint import weight_files
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, keep_none, load_model, read_config
from penstock_enginecore.models.support import quantization_of
from penstock_enginecore.native.backend import multiplies_linears
from penstock_enginecore.native.weights import round_linears
from penstock_enginecore.parallel.collectives import TimedCollectives
from penstock_enginecore.parallel.sharding import Part
from penstock_enginecore.parallel.stage_links import StageLinks
from penstock_enginecore.parallel.tensor_parallel import split_model
from penstock_enginecore.pooling.embedder import load_pooling_model, resolve_task
from penstock_enginecore.speculation.factory import create_drafter
from penstock_enginecore.worker.device_thread import Late

# Interface of the runner of a model, as the worker sees it.


class ModelRunner(Protocol):
    """Holds a loaded model, its KV cache and the state of the requests in its batch.

    ``initialize_kv_cache`` must come before the first step. A step is ``execute`` followed by ``sample``, one step at a
    time. If one of them raises, ``recover`` must come before the next step.
    """

    @property
    def graph_capture(self) -> GraphCapture | None:
        """Captures steps before the first request, or None if no steps are replayed."""

    @property
    def experts(self) -> SharedExperts | None:
        """State of the experts that the ranks of a group share, or None if each rank has the whole model."""

    @property
    def info(self) -> ModelInfo:
        """Properties of the model that the engine needs."""

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """KV cache needs of each attention layer, by layer name in execution order. Empty for encoders, which have no
        KV cache.
        """

    @property
    def computing(self) -> str:
        """Name of the implementation for operators: torch, or the kernels and the parts that they compute."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, including packed ones."""

    @property
    def caches(self) -> LayerCaches:
        """The allocated KV cache of all layers, including those of a drafter. Empty if none is allocated."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of recurrent layers, or 0 for a model without them."""

    @property
    def graphs(self) -> GraphStats:
        """Statistics of replayed steps, on devices that replay steps."""

    @property
    def adapted(self) -> AdaptedForward | None:
        """The forward pass if it supports LoRA adapters, otherwise None."""

    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """Run a step with the largest shapes on a temporary cache, for devices whose peak memory is measured.

        The step has ``num_tokens`` new tokens, of which ``num_seqs`` are sampled. No state remains.
        """

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the KV cache, and start without requests."""

    def drop_kv_cache(self) -> None:
        """Free the KV cache and forget the requests, until ``initialize_kv_cache``."""

    def recover(self) -> None:
        """Forget every request, and compute a token on a temporary cache. Raises the error if that fails."""

    def execute_dummy_batch(self) -> None:
        """Compute a token for no request, on a temporary cache. If ranks share experts, compute experts for the tokens
        of other ranks.
        """

    def execute(self, step: SchedulerOutput) -> None:
        """Run a forward pass over the scheduled tokens. The result is kept for ``sample``."""

    def sample(self, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput | Late[ModelRunnerOutput]:
        """Return the output of the step that ``execute`` ran. The output is empty for a step without tokens.

        If the output is late, the next step may run before the output arrives, because that step does not depend on it.
        """

    def draft(self) -> DraftTokenIds:
        """Return the drafts made after the last sampled step, empty without a drafter. Never raises."""

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        """Run ``passes`` forward passes of ``num_tokens`` tokens of one request, and return the seconds of the fastest.

        All passes run, whatever time they take, because other workers wait in each pass.
        """

    def to(self, device: torch.device) -> None:
        """Move the weights: to the host while the engine sleeps, and back."""


# Batch invariance, checked before anything is loaded.


def check_batch_invariant(config: EngineCoreConfig, device: torch.device, task: str) -> None:
    """Raise ConfigError if ``kernels.batch_invariant`` is set but no native decoder will be tried for this ``task`` and
    ``device``.

    Only native decoders are batch-invariant. Whether a decoder can be used is known after it was verified.
    """
    if not config.kernels.batch_invariant:
        return
    kernels, backend, workers = config.kernels, config.model.attention_backend, config.executor.num_workers
    on_cpu = device.type == "cpu"
    reasons = {
        "kernels.decoder is false, and it is a property of decoders": not kernels.decoder,
        "kernels.isa is 'off', and on CPUs it is a property of the kernels": on_cpu and kernels.isa == "off",
        "kernels.attention is false, which the kernels' decoder needs": on_cpu and not kernels.attention,
        f"model.attention_backend is {backend!r}, and only with 'auto' is a decoder tried": backend != "auto",
        f"the model is to {task}, and decoders only generate": task != "generate",
        f"the executor has {workers} workers, and it is a property of one": workers > 1,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(f"kernels.batch_invariant is true but {found[0]}; change that, or set it to false")


# The fp8 KV cache.

FLOAT8_CAPABILITY = (8, 9)
"""Minimum compute capability for conversions of 8-bit floats (Ada)."""


def check_cache_dtype(config: EngineCoreConfig, device: torch.device) -> None:
    """Raise ConfigError, before anything is loaded, if the device or the attention backend does not support an fp8
    cache.
    """
    if config.cache.dtype != "fp8":
        return
    name = config.model.attention_backend
    if not create_backend(name, device).keeps_float8:
        what = "the kernels for CPUs do" if name == "auto" else f"model.attention_backend {name!r} does"
        raise ConfigError(
            f"cache.dtype is 'fp8', which {what} not keep; use 'auto', or model.attention_backend 'reference', which is slow"
        )
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < FLOAT8_CAPABILITY:
        have, need = (".".join(map(str, capability)) for capability in (found, FLOAT8_CAPABILITY))
        raise ConfigError(
            f"cache.dtype is 'fp8' but {torch.cuda.get_device_name(device)} has compute capability {have}, and {need} is "
            "needed; use 'auto'"
        )


# Weights that are rounded to 8-bit integers after a model was read.

logger = logging.getLogger(__name__)


def check_int8(config: EngineCoreConfig, device: torch.device) -> None:
    """Check the settings for ``model.quantization`` "int8", before anything is loaded.

    Raises:
        ConfigError: Another setting conflicts with int8.
        ModelLoadError: The checkpoint is already quantized.
    """
    if config.model.quantization != "int8":
        return
    kernels, dtype, workers = config.kernels, config.model.dtype, config.executor.num_workers
    reasons = {
        f"model.device is {device.type!r}, and CPUs alone compute by them": device.type != "cpu",
        f"model.dtype is {dtype!r}, and they are computed with in float32": dtype not in ("auto", "float32"),
        "kernels.isa is 'off', and without the kernels they save nothing": kernels.isa == "off",
        "kernels.linear is false, and without it they save nothing": not kernels.linear,
        f"the executor has {workers} workers, and it is tried with one alone": workers > 1,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(f"model.quantization is 'int8' but {found[0]}; change that, or set it to 'auto'")
    if (scheme := quantization_of(read_config(config.model))) is not None:
        raise ModelLoadError(
            f"model.quantization is 'int8' but the checkpoint is quantized already, as {scheme.name}; set it to 'auto'"
        )


def round_weights(module: Any) -> None:
    """Round the weights of all linear layers except the head, which affects the most likely tokens most."""
    error = round_linears(module, but=module.get_output_embeddings())
    logger.info(
        "linear layers but the head are rounded to 8-bit integers: the weights of a layer differ by %.2g %% at most",
        100 * error,
    )


_NOBODY = Onlooker()


def load_runner(
    config: EngineCoreConfig,
    device: torch.device,
    progress: Progress,
    collectives: TimedCollectives | None = None,
    links: StageLinks | None = None,
    onlooker: Onlooker = _NOBODY,
) -> ModelRunner:
    """Read the checkpoint, move it to ``device`` and build its runner, with torch's number of threads.

    If kernels are refuted after they have consumed the weights, the checkpoint is read again.

    Args:
        config: Config of the engine.
        device: Device of this worker.
        progress: Receives progress lines.
        collectives: Collectives of the ranks over which the model is split, or None.
        links: Links of the pipeline stage that this worker computes, or None.
        onlooker: Observes the modules while the model is loaded.

    Raises:
        ModelLoadError: The checkpoint cannot be served.
        ConfigError: Configured kernels are not available.
    """
    kernels, rounded = config.kernels, config.model.dtype == "bfloat16"
    while True:
        try:
            return _load_runner(config, device, progress, collectives, links, onlooker, kernels, rounded=rounded)
        except SpentError as e:
            logger.warning("%s; the model is loaded again", e)
            if not rounded:
                kernels = msgspec.structs.replace(kernels, **{e.name: False})
            rounded = False
        gc.collect()  # free the unused model, whose modules are in reference cycles


def _load_runner(
    config: EngineCoreConfig,
    device: torch.device,
    progress: Progress,
    collectives: TimedCollectives | None,
    links: StageLinks | None,
    onlooker: Onlooker,
    kernels: KernelsConfig,
    *,
    rounded: bool,
) -> ModelRunner:
    """Load the runner with these ``kernels``. If ``rounded``, they may round inputs of products to bfloat16. Also
    raises SpentError.
    """
    task = resolve_task(config.model)
    shared = SharedModel(config) if config.expert_parallel.enabled else None
    if shared is not None:
        check_shared(config, device, task)
    split = None if collectives is None else _Split(collectives, onlooker)
    if links is not None and task != "generate":
        raise ModelLoadError(f"executor.pipeline_parallel_size: models that {task} are not served in stages yet; use 1")
    check_cache_dtype(config, device)
    check_batch_invariant(config, device, task)
    check_int8(config, device)
    checkpoint = config.model
    widen = multiplies_linears(config.kernels, device, rounded=checkpoint.dtype == "bfloat16")
    if int8 := checkpoint.quantization == "int8":
        checkpoint = msgspec.structs.replace(checkpoint, dtype="float32")
    forward = ForwardConfig(
        device=device,
        attention_backend=config.model.attention_backend,
        kernels=kernels,
        num_threads=torch.get_num_threads(),
        block_size=config.cache.block_size,
        cache_dtype=FLOAT8 if config.cache.dtype == "fp8" else None,
        int8=int8,
        rounded=rounded,
    )
    if task == "generate":
        if split is None and links is None:
            keep = kept_weights(device, config.kernels, config.model.attention_backend)
        else:
            keep = keep_none  # only the fused decoder uses them, and only for whole models
        # Layers of other stages need not fit on this device.
        on_host = links is not None
        model = load_model(
            checkpoint,
            device,
            progress,
            keep,
            split,
            on_host=on_host,
            make_share=shared,
            widen=widen,
            with_towers=config.multimodal.enabled,
        )
        check_towers(config, model.encoder)
        if int8:
            round_weights(model.module)
        if split is None:
            onlooker.loaded(model.module)
        if links is None:
            built = build_forward(model, replace(_with_part(forward, split), lora=_slots(config.lora)))
            experts = None if shared is None else _experts(config, shared, model)
            drafter = create_drafter(config, model, built.forward, forward, progress)
            return GenerationRunner(model, built, experts=experts, drafter=drafter)
        stage = StageConfig(
            links=links,
            stage_layers=config.executor.stage_layers,
            max_tokens=config.scheduler.step_tokens,
            max_seqs=config.scheduler.max_num_seqs,
        )
        staged = build_stage(model, _with_part(forward, split), stage)
        onlooker.cut(model.module)
        return StageRunner(model, staged, links)
    towers = config.multimodal.enabled
    pooled = load_pooling_model(checkpoint, task, device, progress, split, widen=widen, with_towers=towers)
    if int8:
        round_weights(pooled.module)
    if split is None:
        onlooker.loaded(pooled.module)
    adapted = replace(_with_part(forward, split), lora=_slots(config.lora))
    return PoolingRunner(pooled, build_backbone(pooled, adapted))


def _slots(lora: LoraConfig) -> SlotLimits | None:
    """Return the size of the slots for adapters, or None without LoRA."""
    return SlotLimits(lora.max_loras, lora.max_lora_rank) if lora.enabled else None


def _experts(config: EngineCoreConfig, shared: SharedModel, model: LoadedModel) -> GroupExperts:
    """Return the experts that this rank will hold once it is in a group."""
    spread = SpreadExperts(dispatched_layers(model.module), config.expert_parallel.dispatch)
    reader = ExpertReader(shared.share, weight_files(config.model), model.dtype)
    return GroupExperts(spread, reader, config.expert_parallel)


def read_again(config: EngineCoreConfig, runner: GenerationRunner, device: torch.device, progress: Progress) -> None:
    """Read the checkpoint again, by way of the host, into the existing weights of ``runner`` on ``device``. Raises
    ModelLoadError.
    """
    keep = kept_weights(device, config.kernels, config.model.attention_backend)
    towers = config.multimodal.enabled
    runner.read(load_model(config.model, torch.device("cpu"), progress, keep, on_host=True, with_towers=towers))


class _Split:
    """Splits a model among ranks, and keeps a description of the remaining ``part``. ``onlooker`` sees the whole model
    before.
    """

    def __init__(self, collectives: TimedCollectives, onlooker: Onlooker) -> None:
        self._collectives = collectives
        self._onlooker = onlooker
        self.part: Part | None = None

    def __call__(self, module: PreTrainedModel) -> None:
        self._onlooker.loaded(module)
        left = split_model(module, self._collectives)
        self._onlooker.split(left.features)
        self.part = Part(self._collectives, left.vocabulary)


def _with_part(forward: ForwardConfig, split: _Split | None) -> ForwardConfig:
    return forward if split is None else replace(forward, part=split.part)
