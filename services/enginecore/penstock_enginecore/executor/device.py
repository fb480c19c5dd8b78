"""Which device a worker computes on, and why it is not the one that was meant."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config.scheduler import STEP_TOKENS

logger = logging.getLogger(__name__)

_CPU_STEP_TOKENS = 512
"""Products of more rows are no faster on a CPU, and activations of so many stay in its caches."""
_CPU_PROMPT_BATCH_TOKENS = 256
"""Products of so many rows are nearly as fast as of more."""
CAPABILITY = (8, 0)
"""The least that kernels are compiled for: bfloat16 and asynchronous copies, from Ampere on."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEV = Path("/dev")


def resolve_device(name: str, worker: int, devices: Sequence[int] = (), dev: Path = _DEV) -> torch.device:
    """The torch device for ``model.device``; ``auto`` is the GPU where there is one that can be used. Of several GPUs each worker
    has its own: that of its number, or what ``devices`` says of it. ``dev``: where the driver's files are. Raises ConfigError.
    """
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rank = devices[worker] if devices else worker
    if count and rank >= count:
        which = f"executor.devices gives worker {worker} device {rank}" if devices else f"worker {worker} has no device"
        raise ConfigError(f"{which}: torch finds {count} CUDA devices here, from 0 on")
    reason = _too_old(rank) if count else f"torch finds no CUDA device here: {_why_none()}"
    if not reason:
        return torch.device("cuda", rank)
    if name == "cuda":
        raise ConfigError(f"model.device is 'cuda' but {reason}; use 'auto' or 'cpu'")
    if count or any(dev.glob("nvidia[0-9]*")):
        logger.warning("computing on the CPU, although there is a GPU: %s", reason)
    return torch.device("cpu")


def step_tokens(device: torch.device) -> int:
    """Tokens of a step on ``device``, beyond which a step takes longer and computes no more in its time."""
    return _CPU_STEP_TOKENS if device.type == "cpu" else STEP_TOKENS


def prompt_batch_tokens(device: torch.device) -> int:
    """Tokens of prompts, beyond which more of them in a step on ``device`` have their first tokens later and none sooner; 0: any
    number.
    """
    return _CPU_PROMPT_BATCH_TOKENS if device.type == "cpu" else 0


def _too_old(rank: int) -> str:
    """Why the GPU cannot be used; empty where it can."""
    found = torch.cuda.get_device_capability(rank)
    if found >= CAPABILITY:
        return ""
    have, need = (".".join(map(str, capability)) for capability in (found, CAPABILITY))
    return f"{torch.cuda.get_device_name(rank)} has compute capability {have}, and {need} is needed"


def _why_none() -> str:
    """As torch or the driver says it, in a sentence without its end."""
    if torch.version.cuda is None:
        return "it was built without CUDA"
    if os.environ.get(_VISIBLE, "0").strip() in ("", "-1"):
        return f"{_VISIBLE} is {os.environ[_VISIBLE]!r}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as e:
        return str(e).split("\n")[0].split(". ")[0].rstrip(".")
    return "the driver shows none"
