"""Which GPU each engine gets. Looks at this machine without torch, which the command never imports."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock_common.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEV = Path("/dev")


def visible_gpus(environ: Mapping[str, str], dev: Path = _DEV) -> list[str]:
    """The GPUs that a process of this machine may use, as ``CUDA_VISIBLE_DEVICES`` names them.

    Those that the variable lists where it is set, up to the first that is none (as CUDA reads it), else one for each device
    file of the driver.
    """
    if VISIBLE in environ:
        names = [name.strip() for name in environ[VISIBLE].split(",")]
        stop = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return names[:stop]
    return [str(i) for i in range(sum(bool(re.fullmatch(r"nvidia\d+", file.name)) for file in dev.glob("nvidia*")))]


def assign(engines: int, workers: int, device: str, gpus: Sequence[str]) -> list[dict[str, str]]:
    """The environment of each engine: where they compute on GPUs, one for each of its ``workers``.

    ``device``: auto, cpu or cuda. A single engine of one worker is left to choose. Raises ConfigError for more workers than GPUs.
    """
    needed = engines * workers
    if device == "cpu" or needed == 1 or (device == "auto" and not gpus):
        return [{} for _ in range(engines)]
    if needed > len(gpus):
        found = f"{len(gpus)} GPU" + ("" if len(gpus) == 1 else "s")
        asked = f"--engines is {engines}; each"
        if workers > 1:
            asked = f"--engines is {engines}, of {workers} workers each; each worker"
        fits = f"--engines {max(len(gpus) // workers, 1)}"
        if 0 < len(gpus) < workers:
            fits = "fewer workers"
        raise ConfigError(
            f"{asked} takes a GPU of its own, and this machine shows {found} ({', '.join(gpus) or 'none'}); use {fits}, "
            f"set {VISIBLE}, or --device cpu"
        )
    return [{VISIBLE: ",".join(gpus[i * workers : (i + 1) * workers])} for i in range(engines)]
