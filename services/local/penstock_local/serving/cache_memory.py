"""Checks, before anything is loaded, that a KV cache of the given size fits into this machine's memory."""

from collections.abc import Sequence

from penstock_common.config.sizes import parse_bytes
from penstock_common.memory import Memory, check_fits


def check_cache_memory(
    key: str, size: int | str | None, *, device: str, gpus: Sequence[str], memory: Memory | None, count: int = 1
) -> None:
    """Raise ConfigError when workers that compute on the CPU would need more than this machine has left.

    ``size``: of each of ``count`` workers, in bytes or as text; None: the engine decides. ``device``: auto, cpu or cuda.
    ``gpus``: those of this machine. ``memory``: None where it cannot be found out. A GPU's memory is checked by its engine,
    which has torch.
    """
    if size is None or memory is None or device == "cuda" or (device == "auto" and gpus):
        return
    check_fits(key, parse_bytes(size, key=key), memory, count=count)
