"""Sleep of a worker whose weights and KV cache have the same device addresses after it wakes up."""

import logging

import torch

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.cuda_virtual_memory import CudaDriver, Driver, KeptMemory
from penstock_enginecore.executor.generation.runner import GenerationRunner
from penstock_enginecore.executor.loading import ModelRunner, read_again

logger = logging.getLogger(__name__)


class KeptSleep:
    """Frees the device memory of ``runner`` for sleep and restores it, without rebuilding the runner. So the runner's
    captured CUDA graphs stay valid.
    """

    def __init__(self, config: EngineCoreConfig, runner: GenerationRunner, kept: KeptMemory) -> None:
        self._config = config
        self._runner = runner
        self._kept = kept

    @property
    def weights_are_gone(self) -> bool:
        """Whether the weights were dropped, so that they are neither on the device nor on the host."""
        return self._kept.weights == "dropped"

    @property
    def cache_is_gone(self) -> bool:
        """Whether the memory of the KV cache is freed."""
        return self._kept.cache == "dropped"

    def sleep(self, level: int) -> None:
        """Free the device memory of the weights and the KV cache. Weights move to the host (level 1) or are dropped
        (level 2).
        """
        self._runner.forget_requests()
        self._kept.sleep(level)

    def wake_up(self, tags: list[str], device: torch.device) -> None:
        """Restore the memory that ``tags`` name ("weights", "kv_cache"). A later call can restore the memory that
        ``tags`` does not name.

        Raises:
            MemoryError: The restored memory does not fit on the device.
            ModelLoadError: The checkpoint cannot be read again.
        """
        if "weights" in tags and not self._kept.wake_weights():
            read_again(self._config, self._runner, device, logger.info)
            self._kept.weights_are_read()
        if "kv_cache" in tags:
            self._kept.wake_cache()

    def close(self) -> None:
        """Free all device memory of the weights and the KV cache. The runner must not be used afterwards."""
        self._kept.close()


def kept_sleep(config: EngineCoreConfig, runner: ModelRunner, device: torch.device) -> KeptSleep | None:
    """Move the weights and the KV cache of ``runner`` to device addresses that survive sleep, and return the object for
    sleep.

    Returns None if ``executor.keep_addresses`` is false, or if the memory cannot be moved. In the second case, the log
    has the reason.
    """
    if not config.executor.keep_addresses:
        return None
    try:
        kept = KeptMemory(open_driver(device), _give_back)
        if not isinstance(runner, GenerationRunner):
            raise RuntimeError("the model does not generate tokens")
        runner.keep(kept)
    except (RuntimeError, MemoryError) as e:
        logger.warning("executor.keep_addresses has no effect: %s", e)
        return None
    return KeptSleep(config, runner, kept)


def open_driver(device: torch.device) -> Driver:
    """Return the interface to the device's virtual memory. Raises RuntimeError if memory of the device cannot be freed
    and allocated again at the same address.
    """
    if device.type != "cuda":
        raise RuntimeError(
            f"on device {device}, memory cannot be freed and allocated again at the same address; only CUDA devices support this"
        )
    return CudaDriver(device)


def _give_back() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
