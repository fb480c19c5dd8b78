"""Loads a model and makes the runner for what it is used for."""

from collections.abc import Callable
from functools import partial

import msgspec
import torch
from transformers import PreTrainedModel

from penstock_enginecore.attention.kv_cache import FLOAT8
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.executor.cache_dtype import check_cache_dtype
from penstock_enginecore.executor.generation.runner import GenerationRunner
from penstock_enginecore.executor.generation.stage_runner import StageRunner
from penstock_enginecore.executor.model_runner import ModelRunner
from penstock_enginecore.executor.pooling.runner import PoolingRunner
from penstock_enginecore.forward.build import ForwardConfig, build_backbone, build_forward, build_stage
from penstock_enginecore.forward.cuda.candidate import kept_weights
from penstock_enginecore.forward.stage import StageConfig
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.parallel.collectives import Collectives
from penstock_enginecore.parallel.layers import split_model
from penstock_enginecore.parallel.stage_links import StageLinks
from penstock_enginecore.pooling.embedder import load_pooling_model, resolve_task


def load_runner(
    config: EngineCoreConfig,
    device: torch.device,
    progress: Progress,
    collectives: Collectives | None = None,
    links: StageLinks | None = None,
) -> ModelRunner:
    """Read the checkpoint, move it to ``device`` and build what runs it, with as many threads as torch has. Raises
    ModelLoadError for a checkpoint that cannot be served, ConfigError for kernels that cannot be had. ``collectives``: of the
    ranks that the model is split over; its modules compute it then, since the kernels for one device know nothing of them.
    ``links``: of the stage that this worker computes.
    """
    task = resolve_task(config.model)
    kernels = config.kernels
    split: Callable[[PreTrainedModel], None] | None = None
    if collectives is not None:
        kernels = msgspec.structs.replace(kernels, decoder=False, linear=False)
        _check_served("tensor_parallel_size", device, task)
        split = partial(split_model, collectives=collectives)
    if links is not None:
        _check_served("pipeline_parallel_size", device, task)
    check_cache_dtype(config, device)
    forward = ForwardConfig(
        device=device,
        attention_backend=config.model.attention_backend,
        kernels=kernels,
        num_threads=torch.get_num_threads(),
        block_size=config.cache.block_size,
        cache_dtype=FLOAT8 if config.cache.dtype == "fp8" else None,
    )
    if task == "generate":
        keep = kept_weights(device, config.kernels, config.model.attention_backend)
        model = load_model(config.model, device, progress, keep, split)
        if links is None:
            return GenerationRunner(model, build_forward(model, forward))
        stage = StageConfig(
            links=links,
            stage_layers=config.executor.stage_layers,
            max_tokens=config.scheduler.max_num_batched_tokens,
            max_seqs=config.scheduler.max_num_seqs,
        )
        return StageRunner(model, build_stage(model, forward, stage), links)
    pooled = load_pooling_model(config.model, task, device, progress)
    return PoolingRunner(pooled, build_backbone(pooled, forward))


def _check_served(setting: str, device: torch.device, task: str) -> None:
    """Raise ModelLoadError for what is not served by several workers."""
    if task != "generate":
        raise ModelLoadError(f"executor.{setting}: models that {task} are not served by several workers yet; use 1")
    if device.type != "cpu":
        raise ModelLoadError(f"executor.{setting}: {device.type} is not served by several workers yet; use 1")
