"""Loads a model and makes the runner for what it is used for."""

import torch

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.executor.generation.runner import GenerationRunner
from penstock_enginecore.executor.model_runner import ModelRunner
from penstock_enginecore.executor.pooling.runner import PoolingRunner
from penstock_enginecore.forward.build import ForwardConfig, build_backbone, build_forward
from penstock_enginecore.forward.cuda.candidate import kept_weights
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.pooling.embedder import load_pooling_model, resolve_task


def load_runner(config: EngineCoreConfig, device: torch.device, progress: Progress) -> ModelRunner:
    """Read the checkpoint, move it to ``device`` and build what runs it, with as many threads as torch has. Raises
    ModelLoadError for a checkpoint that cannot be served, ConfigError for kernels that cannot be had.
    """
    task = resolve_task(config.model)
    forward = ForwardConfig(
        device=device,
        attention_backend=config.model.attention_backend,
        kernels=config.kernels,
        num_threads=torch.get_num_threads(),
        block_size=config.cache.block_size,
    )
    if task == "generate":
        keep = kept_weights(device, config.kernels, config.model.attention_backend)
        model = load_model(config.model, device, progress, keep)
        return GenerationRunner(model, build_forward(model, forward))
    pooled = load_pooling_model(config.model, task, device, progress)
    return PoolingRunner(pooled, build_backbone(pooled, forward))
