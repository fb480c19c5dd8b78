"""Whether a KV cache of the size that was asked for can be had, before anything is loaded."""

from collections.abc import Sequence

from penstock_common.config.sizes import parse_bytes
from penstock_common.memory import Memory, check_fits


def check_cache_memory(
    key: str, size: int | str | None, *, device: str, gpus: Sequence[str], memory: Memory | None, engines: int = 1
) -> None:
    """Raise ConfigError when engines that compute on the CPU would need more than this machine has left.

    ``size``: bytes or text of each engine, None leaves it to the engine; ``device`` and ``gpus`` as in ``devices``; ``memory``
    None: nobody knows. Of a GPU's memory its engine knows, once it has torch.
    """
    if size is None or memory is None or device == "cuda" or (device == "auto" and gpus):
        return
    check_fits(key, parse_bytes(size, key=key), memory, count=engines)
