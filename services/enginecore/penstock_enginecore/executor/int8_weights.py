"""Weights that are rounded to 8-bit integers when a model has been read: where that can be, and of which layers."""

import logging
from typing import Any

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import read_config
from penstock_enginecore.models.support import quantization_of
from penstock_enginecore.native.int8 import round_linears

logger = logging.getLogger(__name__)


def check_int8(config: EngineCoreConfig, device: torch.device) -> None:
    """Before anything is loaded, where ``model.quantization`` asks for integers: raise ConfigError for settings that they cannot
    be had with, ModelLoadError for a checkpoint that is quantized already.
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
    """Round those of all linear layers of a ``PreTrainedModel`` but the head, which the likeliest tokens depend on most."""
    error = round_linears(module, but=module.get_output_embeddings())
    logger.info(
        "linear layers but the head are rounded to 8-bit integers: the weights of a layer differ by %.2g %% at most",
        100 * error,
    )
