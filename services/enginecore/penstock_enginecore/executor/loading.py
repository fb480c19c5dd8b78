"""Model loading: creation of the runner for a checkpoint and its task, and refusal of settings that the model or device
does not support.
"""

import gc
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import torch
from transformers import PreTrainedModel

from penstock_common.errors import ConfigError
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import FLOAT8, LayerCaches
from penstock_enginecore.config import EngineCoreConfig, KernelsConfig, LoraConfig
from penstock_enginecore.config.model import Quantization
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import DraftTokenIds, GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.data_parallel.core.group_channels import SharedExperts
from penstock_enginecore.executor.generation.graph_capture import GraphCapture
from penstock_enginecore.executor.generation.runner import GenerationRunner, StageRunner
from penstock_enginecore.executor.pooling_runner import PoolingRunner
from penstock_enginecore.executor.speech_settings import check_speech
from penstock_enginecore.experts.group_experts import GroupExperts
from penstock_enginecore.experts.layer import SpreadExperts, dispatched_layers
from penstock_enginecore.experts.loading import ExpertReader, SharedModel, check_shared
from penstock_enginecore.forward.base import ForwardPass
from penstock_enginecore.forward.build import ForwardConfig, build_backbone, build_forward, build_stage
from penstock_enginecore.forward.cuda.decoder import FusedForward, kept_weights
from penstock_enginecore.forward.equivalence_check import SpentError
from penstock_enginecore.forward.speech_build import build_speech_forward
from penstock_enginecore.forward.stage import StageConfig
from penstock_enginecore.lora.adapter import AdaptedForward
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.lora.store import Onlooker
from penstock_enginecore.media.towers import check_towers
from penstock_enginecore.models.checkpoint import weight_files
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel, keep_none, load_model, read_config
from penstock_enginecore.models.quantization.rounding import round_to_float8
from penstock_enginecore.models.support import quantization_of
from penstock_enginecore.native.backend import multiplies_linears
from penstock_enginecore.native.weights import round_linears
from penstock_enginecore.parallel.collectives import TimedCollectives
from penstock_enginecore.parallel.sharding import Part
from penstock_enginecore.parallel.stage_links import StageLinks
from penstock_enginecore.parallel.tensor_parallel import split_model
from penstock_enginecore.pooling.embedder import load_pooling_model, resolve_task
from penstock_enginecore.speculation.factory import create_drafter
from penstock_enginecore.states.memory import StateLayers
from penstock_enginecore.worker.device_thread import Late

# Interface with which the worker runs a model.


class ModelRunner(Protocol):
    """Loaded model, with its KV cache and the state of the requests in its batch.

    Call ``initialize_kv_cache`` before the first step. A step is a call of ``execute`` followed by a call of
    ``sample``. Steps do not overlap. If ``execute`` or ``sample`` raises an error, call ``recover`` before the next
    step.
    """

    @property
    def graph_capture(self) -> GraphCapture | None:
        """Captures steps as CUDA graphs before the first request, or None if this runner replays no graphs."""

    @property
    def experts(self) -> SharedExperts | None:
        """State of the experts that are distributed among the ranks of a data-parallel group, or None if each rank has
        the whole model.
        """

    @property
    def info(self) -> ModelInfo:
        """Properties of the model that the engine needs."""

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """KV cache spec of each attention layer, by layer name in execution order. The dictionary is empty for
        encoders, which have no KV cache.
        """

    @property
    def computing(self) -> str:
        """Name of the implementation of the forward pass for the engine's log: torch, or the kernels and the layers
        that the kernels compute.
        """

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the weights, including packed weights."""

    @property
    def caches(self) -> LayerCaches:
        """Allocated KV cache of all layers, including the layers of a drafter. The dictionary is empty if no KV cache
        is allocated.
        """

    @property
    def state_layers(self) -> StateLayers:
        """Allocated memory for the states of recurrent layers. The dictionary is empty if no memory is allocated, and
        for models without recurrent layers.
        """

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the memory for the states of recurrent layers, or 0 for a model without recurrent layers."""

    @property
    def graphs(self) -> GraphStats:
        """Statistics of captured and replayed CUDA graphs. All numbers are 0 if the runner replays no steps."""

    @property
    def adapted(self) -> AdaptedForward | None:
        """The forward pass if it supports LoRA adapters, otherwise None."""

    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """Run a step with the largest shapes and a temporary KV cache, so that the caller can measure the peak memory.

        The step computes ``num_tokens`` new tokens and samples from the logits of ``num_seqs`` of these tokens.
        Afterwards the runner is unchanged.
        """

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the KV cache, and start with an empty batch."""

    def drop_kv_cache(self) -> None:
        """Free the KV cache and forget all requests. Steps need ``initialize_kv_cache`` first."""

    def recover(self) -> None:
        """Forget every request, and test the device by computing a token, which changes no KV block. Captured graphs
        stay valid. Raises the error if the test fails.
        """

    def execute_dummy_batch(self) -> None:
        """Compute a dummy token, which changes no KV block. Captured graphs stay valid. If experts are distributed among
        ranks, instead compute this rank's experts for the tokens of other ranks.
        """

    def execute(self, step: SchedulerOutput) -> None:
        """Run a forward pass over the scheduled tokens, and store the result for ``sample``."""

    def sample(self, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput | Late[ModelRunnerOutput]:
        """Return the output of the step that ``execute`` ran. The output is empty for a step without tokens.

        If the output is ``Late``, the next step may run before this output arrives, because that step does not need the
        output.
        """

    def draft(self) -> DraftTokenIds:
        """Return drafts of the tokens that follow the last sampled step, or no drafts if there is no drafter. Never
        raises an error.
        """

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        """Run ``passes`` forward passes over ``num_tokens`` tokens of one request, and return the duration of the
        fastest pass in seconds.

        All passes run, even if they are slow, because other workers take part in each pass.
        """

    def to(self, device: torch.device) -> None:
        """Move the weights to ``device``: to the host before the engine sleeps, and back when the engine wakes up."""


# Check of the settings for batch invariance, which runs before the model is loaded.


def check_batch_invariant(config: EngineCoreConfig, device: torch.device, task: str) -> None:
    """Raise ConfigError if ``kernels.batch_invariant`` is set, but another setting, ``task`` or ``device`` does not
    allow a native decoder.

    Only native decoders are batch-invariant. This check runs before the model is loaded. A later check finds out
    whether a native decoder can compute the model.
    """
    if not config.kernels.batch_invariant:
        return
    kernels, backend, workers = config.kernels, config.model.attention_backend, config.executor.num_workers
    on_cpu = device.type == "cpu"
    reasons = {
        "kernels.decoder is false, and only decoders are batch-invariant": not kernels.decoder,
        "kernels.isa is 'off', and on CPUs only native kernels are batch-invariant": on_cpu and kernels.isa == "off",
        "kernels.attention is false, and the decoder on CPUs needs these kernels": on_cpu and not kernels.attention,
        f"model.attention_backend is {backend!r}, and decoders are used only with 'auto'": backend != "auto",
        f"the task of the model is {task}, and decoders support only generate": task != "generate",
        f"the executor has {workers} workers, and batch invariance needs exactly one": workers > 1,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(
            f"kernels.batch_invariant is true, but {found[0]}; change that setting, or set kernels.batch_invariant to false"
        )


def check_attention_library(config: EngineCoreConfig, device: torch.device, task: str) -> None:
    """Raise ConfigError if ``kernels.attention_library`` is "cudnn", but another setting, ``task`` or ``device`` does not
    allow cuDNN. This check runs before the model is loaded. A later check compares the results of cuDNN.
    """
    if config.kernels.attention_library != "cudnn":
        return
    backend = config.model.attention_backend
    reasons = {
        f"the model runs on a device of type {device.type}, and cuDNN needs a GPU": device.type != "cuda",
        "model.attention_backend is 'reference', which uses no library": backend == "reference",
        "cache.dtype is 'fp8', and cuDNN needs a KV cache of the model's type": config.cache.dtype == "fp8",
        f"the task of the model is {task}, and only models that generate text use a library": task != "generate",
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(
            f"kernels.attention_library is 'cudnn', but {found[0]}; change that setting, or set kernels.attention_library "
            "to 'auto'"
        )


# Check of the settings for a KV cache of 8-bit floats (fp8).

FLOAT8_CAPABILITY = (8, 9)
"""Minimum compute capability of a GPU with instructions that convert 8-bit floats (Ada)."""


def check_cache_dtype(config: EngineCoreConfig, device: torch.device) -> None:
    """Raise ConfigError if the device or the attention backend does not support an fp8 KV cache. This check runs before
    the model is loaded.
    """
    if config.cache.dtype != "fp8":
        return
    name = config.model.attention_backend
    if not create_backend(name, device).keeps_float8:
        what = "the kernels for CPUs do" if name == "auto" else f"model.attention_backend {name!r} does"
        raise ConfigError(
            f"cache.dtype is 'fp8', which {what} not support; set cache.dtype to 'auto', or model.attention_backend to "
            "'reference', which is slow"
        )
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < FLOAT8_CAPABILITY:
        have, need = (".".join(map(str, capability)) for capability in (found, FLOAT8_CAPABILITY))
        raise ConfigError(
            f"cache.dtype is 'fp8', but {torch.cuda.get_device_name(device)} has compute capability {have}, and {need} is "
            "required; set cache.dtype to 'auto'"
        )


# Rounding of weights to 8 bits (the setting ``model.quantization``) after a model is loaded.

logger = logging.getLogger(__name__)


def check_int8(config: EngineCoreConfig, device: torch.device) -> None:
    """Check the settings if ``model.quantization`` is "int8". This check runs before the model is loaded.

    Raises:
        ConfigError: Another setting conflicts with "int8".
        ModelLoadError: The checkpoint is already quantized.
    """
    if config.model.quantization != "int8":
        return
    kernels, dtype, workers = config.kernels, config.model.dtype, config.executor.num_workers
    reasons = {
        f"model.device is {device.type!r}, and only CPUs support int8 weights": device.type != "cpu",
        f"model.dtype is {dtype!r}, and int8 weights are computed in float32": dtype not in ("auto", "float32"),
        "kernels.isa is 'off', and int8 weights save nothing without the kernels": kernels.isa == "off",
        "kernels.linear is false, and int8 weights save nothing without this kernel": not kernels.linear,
        f"the executor has {workers} workers, and int8 is supported only with one": workers > 1,
    }
    _refuse(config, reasons)


def check_float8(config: EngineCoreConfig, device: torch.device, task: str) -> None:
    """Check the settings if ``model.quantization`` is "fp8". This check runs before the model is loaded.

    Raises:
        ConfigError: Another setting conflicts with "fp8".
        ModelLoadError: The checkpoint is already quantized.
    """
    if config.model.quantization != "fp8":
        return
    kernels, backend, workers = config.kernels, config.model.attention_backend, config.executor.num_workers
    reasons = {
        f"model.device is {device.type!r}, and only GPUs support fp8 weights": device.type != "cuda",
        "kernels.decoder is false, and only the fused decoder computes with fp8 weights": not kernels.decoder,
        f"model.attention_backend is {backend!r}, and the fused decoder is used only with 'auto'": backend != "auto",
        f"the task of the model is {task}, and the fused decoder supports only generate": task != "generate",
        f"the executor has {workers} workers, and fp8 is supported only with one": workers > 1,
        "expert_parallel.enabled is true, and shared experts stay unquantized": config.expert_parallel.enabled,
    }
    _refuse(config, reasons)


def _refuse(config: EngineCoreConfig, reasons: Mapping[str, bool]) -> None:
    """Raise ConfigError with the first reason that holds, and ModelLoadError for a quantized checkpoint."""
    name = config.model.quantization
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(
            f"model.quantization is {name!r}, but {found[0]}; change that setting, or set model.quantization to 'auto'"
        )
    if (scheme := quantization_of(read_config(config.model))) is not None:
        raise ModelLoadError(
            f"model.quantization is {name!r}, but the checkpoint is already quantized as {scheme.name}; "
            "set model.quantization to 'auto'"
        )


def round_weights(module: Any, quantization: Quantization) -> None:
    """Round the weights of all linear layers, except the output head, as ``quantization`` says. "fp8" also rounds the
    weights of experts.

    The head is excluded, because its weights have the most influence on which tokens are most likely.
    """
    if quantization == "auto":
        return
    if quantization == "int8":
        kinds, numbers, error = "", "integers", round_linears(module, but=module.get_output_embeddings())
    else:
        kinds, numbers, error = ", and of experts,", "floats", round_to_float8(module)
    logger.info(
        "rounded the weights of all linear layers except the output head%s to 8-bit %s (max_difference_percent is the "
        "largest norm of a weight's rounding errors, as a percentage of the norm of the weight) "
        "max_difference_percent=%.2g",
        kinds,
        numbers,
        100 * error,
    )


def check_computed(config: EngineCoreConfig, forward: ForwardPass, module: torch.nn.Module) -> None:
    """Raise ModelLoadError if weights were rounded to 8-bit floats for the fused decoder, but ``forward`` is another
    implementation, which would use dequantized weights.
    """
    if config.model.quantization == "fp8" and not isinstance(forward, FusedForward):
        raise ModelLoadError(
            f"model.quantization is 'fp8', but the fused decoder does not support {type(module).__name__}, and only the "
            "fused decoder computes with fp8 weights; set model.quantization to 'auto'"
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
    """Load the checkpoint onto ``device`` and build its runner. CPU kernels use as many threads as torch.

    If a kernel is rejected after it has freed weights of the model, the checkpoint is read again.

    Args:
        config: Config of the engine.
        device: Device of this worker.
        progress: Function that receives text about the progress of loading.
        collectives: Collective operations of the tensor-parallel ranks of the model, or None if the model is not split.
        links: Links from this worker's pipeline stage to the other stages, or None.
        onlooker: Observer of the model's modules while the model is loaded.

    Raises:
        ModelLoadError: The checkpoint cannot be served.
        ConfigError: Kernels that the configuration names are not available.
    """
    kernels, rounded = config.kernels, config.model.dtype == "bfloat16"
    while True:
        try:
            return _load_runner(config, device, progress, collectives, links, onlooker, kernels, rounded=rounded)
        except SpentError as e:
            logger.warning(
                "%s; loading the model again, because the rejected implementation had freed some of the model's weights",
                e,
            )
            if not rounded:
                kernels = msgspec.structs.replace(kernels, **{e.name: False})
            rounded = False
        gc.collect()  # free the rejected model, whose modules are in reference cycles


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
    """Load the runner with ``kernels``. If ``rounded`` is true, the kernels may round inputs of matrix products to
    bfloat16.

    Raises the errors of ``load_runner``, and SpentError.
    """
    task = resolve_task(config.model)
    shared = SharedModel(config) if config.expert_parallel.enabled else None
    if shared is not None:
        check_shared(config, device, task)
    split = None if collectives is None else _Split(collectives, onlooker)
    if links is not None and task != "generate":
        raise ModelLoadError(
            f"executor.pipeline_parallel_size is above 1, but models with task {task} support only 1; set it to 1"
        )
    check_cache_dtype(config, device)
    check_batch_invariant(config, device, task)
    check_attention_library(config, device, task)
    check_int8(config, device)
    check_float8(config, device, task)
    check_speech(config, task)
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
            keep = keep_none  # only the fused decoder, for models that are not split, keeps quantized weights
        # Load to host memory first, because the layers of all stages together may not fit on this device.
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
        round_weights(model.module, checkpoint.quantization)
        if split is None:
            onlooker.loaded(model.module)
        adapted = replace(_with_part(forward, split), lora=_slots(config.lora))
        if links is None:
            built = (build_speech_forward if model.sound_positions else build_forward)(model, adapted)
            check_computed(config, built.forward, model.module)
            experts = None if shared is None else _experts(config, shared, model)
            drafter = create_drafter(config, model, built.forward, forward, progress)
            return GenerationRunner(model, built, experts=experts, drafter=drafter)
        stage = StageConfig(
            links=links,
            stage_layers=config.executor.stage_layers,
            max_tokens=config.scheduler.step_tokens,
            max_seqs=config.scheduler.max_num_seqs,
        )
        staged = build_stage(model, adapted, stage)
        onlooker.cut(model.module)
        return StageRunner(model, staged, links)
    towers = config.multimodal.enabled
    pooled = load_pooling_model(checkpoint, task, device, progress, split, widen=widen, with_towers=towers)
    round_weights(pooled.module, checkpoint.quantization)
    if split is None:
        onlooker.loaded(pooled.module)
    adapted = replace(_with_part(forward, split), lora=_slots(config.lora))
    return PoolingRunner(pooled, build_backbone(pooled, adapted))


def _slots(lora: LoraConfig) -> SlotLimits | None:
    """Return the number of slots for LoRA adapters and the maximum rank of an adapter, or None if LoRA is disabled."""
    return SlotLimits(lora.max_loras, lora.max_lora_rank) if lora.enabled else None


def _experts(config: EngineCoreConfig, shared: SharedModel, model: LoadedModel) -> GroupExperts:
    """Return the experts that this rank will compute after it has joined a data-parallel group."""
    spread = SpreadExperts(dispatched_layers(model.module), config.expert_parallel.dispatch)
    reader = ExpertReader(shared.share, weight_files(config.model), model.dtype)
    return GroupExperts(spread, reader, config.expert_parallel)


def read_again(config: EngineCoreConfig, runner: GenerationRunner, device: torch.device, progress: Progress) -> None:
    """Read the checkpoint again into host memory, and copy its weights into the memory of the weights of ``runner`` on
    ``device``.

    Raises ModelLoadError if the checkpoint cannot be read.
    """
    keep = kept_weights(device, config.kernels, config.model.attention_backend)
    towers = config.multimodal.enabled
    model = load_model(config.model, torch.device("cpu"), progress, keep, on_host=True, with_towers=towers)
    round_weights(model.module, config.model.quantization)
    runner.read(model)


class _Split:
    """Callable that splits a model among tensor-parallel ranks, and stores this rank's shard as ``part``.

    ``onlooker`` receives the complete model before the split.
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
