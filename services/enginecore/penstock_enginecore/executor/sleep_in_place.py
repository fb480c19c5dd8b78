"""The sleep of a worker whose weights and KV cache keep their addresses."""

import logging

import torch

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.cuda_virtual_memory import CudaDriver, Driver, KeptMemory
from penstock_enginecore.executor.generation.runner import GenerationRunner
from penstock_enginecore.executor.loading import ModelRunner, read_again

logger = logging.getLogger(__name__)


class KeptSleep:
    """Of ``runner``: nothing of it is made anew when it wakes, so that its graphs stay."""

    def __init__(self, config: EngineCoreConfig, runner: GenerationRunner, kept: KeptMemory) -> None:
        self._config = config
        self._runner = runner
        self._kept = kept

    @property
    def weights_are_gone(self) -> bool:
        """Whether they are neither here nor on the host."""
        return self._kept.weights == "dropped"

    @property
    def cache_is_gone(self) -> bool:
        """Whether there is no KV cache."""
        return self._kept.cache == "dropped"

    def sleep(self, level: int) -> None:
        """Give memory of the device back; weights go to the host (level 1) or are gone (level 2)."""
        self._runner.forget_requests()
        self._kept.sleep(level)

    def wake_up(self, tags: list[str], device: torch.device) -> None:
        """Take back what ``tags`` name. MemoryError where that does not fit, ModelLoadError where the checkpoint cannot be read
        again; what has not woken sleeps on, and may be woken later.
        """
        if "weights" in tags and not self._kept.wake_weights():
            read_again(self._config, self._runner, device, logger.info)
            self._kept.weights_are_read()
        if "kv_cache" in tags:
            self._kept.wake_cache()

    def close(self) -> None:
        """Give up everything. The runner may not be used any more."""
        self._kept.close()


def kept_sleep(config: EngineCoreConfig, runner: ModelRunner, device: torch.device) -> KeptSleep | None:
    """Moves what ``runner`` holds of the device to where it can sleep. None where that is not asked for, and where it cannot be:
    the log says why.
    """
    if not config.executor.keep_addresses:
        return None
    try:
        kept = KeptMemory(open_driver(device), _give_back)
        if not isinstance(runner, GenerationRunner):
            raise RuntimeError("the model does not generate")
        runner.keep(kept)
    except (RuntimeError, MemoryError) as e:
        logger.warning("executor.keep_addresses has no effect: %s", e)
        return None
    return KeptSleep(config, runner, kept)


def open_driver(device: torch.device) -> Driver:
    """That of the device. RuntimeError where there is none."""
    if device.type != "cuda":
        raise RuntimeError(f"there is no virtual memory of {device}")
    return CudaDriver(device)


def _give_back() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
