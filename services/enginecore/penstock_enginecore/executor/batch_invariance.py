"""Where batch invariance cannot be had, said before anything is loaded."""

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig


def check_batch_invariant(config: EngineCoreConfig, device: torch.device, task: str) -> None:
    """Raise ConfigError where ``kernels.batch_invariant`` is asked for and no decoder of ours will be tried for a model that does
    ``task`` on ``device``: nothing else keeps to it. Whether a decoder serves is known when it is proved.
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
