"""Resources of this machine: GPUs for each engine, memory for the KV cache, and free TCP ports."""

import contextlib
import os
import random
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from penstock_common.config.settings import parse_bytes
from penstock_common.errors import ConfigError
from penstock_common.memory import Memory, check_fits

# This module does not use torch, because the command never imports torch.

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEV = Path("/dev")


def visible_gpus(environ: Mapping[str, str], dev: Path = _DEV) -> list[str]:
    """Return the GPUs that a process on this machine may use, as named in ``CUDA_VISIBLE_DEVICES``.

    If the variable is set, its entries before the first invalid entry are used, as in CUDA. Otherwise each device file
    of the driver is one GPU.
    """
    if VISIBLE in environ:
        names = [name.strip() for name in environ[VISIBLE].split(",")]
        stop = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return names[:stop]
    return [str(i) for i in range(sum(bool(re.fullmatch(r"nvidia\d+", file.name)) for file in dev.glob("nvidia*")))]


def assign(engines: int, workers: int, device: str, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Return the extra environment of each engine, which assigns one GPU to each of its ``workers``.

    ``device`` is auto, cpu or cuda. The environments are empty if engines run on the CPU, or if a single engine with
    one worker chooses its own device. Raises ConfigError if there are more workers than GPUs.
    """
    needed = engines * workers
    if device == "cpu" or needed == 1 or (device == "auto" and not gpus):
        return [{} for _ in range(engines)]
    if needed > len(gpus):
        found = f"{len(gpus)} GPU" + ("" if len(gpus) == 1 else "s")
        asked = f"--engines is {engines}; each engine"
        if workers > 1:
            asked = f"--engines is {engines}, with {workers} workers each; each worker"
        fits = f"--engines {max(len(gpus) // workers, 1)}"
        if 0 < len(gpus) < workers:
            fits = "fewer workers"
        raise ConfigError(
            f"{asked} needs a GPU of its own, and this machine shows {found} ({', '.join(gpus) or 'none'}); use "
            f"{fits}, set {VISIBLE}, or --device cpu"
        )
    return [{VISIBLE: ",".join(gpus[i * workers : (i + 1) * workers])} for i in range(engines)]


def assign_all(needs: Sequence[tuple[int, int, str]], gpus: Sequence[str]) -> list[dict[str, str]]:
    """Return the extra environment of each engine of several models, model by model.

    ``needs`` has the number of engines, the workers per engine and the device of each model. Raises ConfigError if
    there are more workers than GPUs.
    """
    if len(needs) == 1:
        return assign(*needs[0], gpus)
    left = list(gpus)
    found: list[dict[str, str]] = []
    for engines, workers, device in needs:
        if device == "cpu" or (device == "auto" and not gpus):
            found += [{} for _ in range(engines)]
            continue
        if engines * workers > len(left):
            needed = sum(engines * workers for engines, workers, device in needs if device != "cpu")
            raise ConfigError(
                f"the engines of the models need {needed} GPUs, one for each worker, and this machine shows {len(gpus)}; "
                f"set {VISIBLE}, or device: cpu for some of the models"
            )
        found += [{VISIBLE: ",".join(left[i * workers : (i + 1) * workers])} for i in range(engines)]
        del left[: engines * workers]
    return found


def check_cache_memory(
    key: str, size: int | str | None, *, device: str, gpus: Sequence[str], memory: Memory | None, count: int = 1
) -> None:
    """Raise ConfigError if CPU workers need more memory than this machine has left.

    A GPU's memory is checked by its engine, because the check needs torch.

    Args:
        key: Setting or flag for the size, for errors.
        size: KV cache of each worker, in bytes or as text; None if the engine decides.
        device: auto, cpu or cuda.
        gpus: GPUs of this machine.
        memory: Memory of this machine, or None if it is unknown.
        count: Number of workers.
    """
    if size is None or memory is None or device == "cuda" or (device == "auto" and gpus):
        return
    check_fits(key, parse_bytes(size, key=key), memory, count=count)


LOOPBACK = "127.0.0.1"
_INTERNAL_PORTS = range(20_000, 32_000)


def free_ports(count: int, *, but: Collection[int] = ()) -> list[int]:
    """Return ``count`` different free TCP ports of the loopback interface, none of them in ``but``.

    The ports are below the range that Linux uses for outgoing connections (32768 and up). Otherwise an outgoing
    connection could use a port before the service listens on it.
    """
    ports: list[int] = []
    for port in random.sample(_INTERNAL_PORTS, len(_INTERNAL_PORTS)):
        if len(ports) == count:
            break
        if port not in but and why_taken(LOOPBACK, port) is None:
            ports.append(port)
    return ports


def check_host(host: str) -> None:
    """Raise ConfigError if no program on this machine can listen on ``host``."""
    if (problem := why_taken(host, 0)) is not None:
        raise ConfigError(
            f"--host is {host!r}, but nothing can listen on it: {problem}; use an address of this machine, "
            "127.0.0.1 for local programs only, or 0.0.0.0 for all networks"
        )


def check_free(host: str, port: int, *, flag: str) -> None:
    """Raise ConfigError if the port cannot be used. The message suggests ``flag`` to choose another."""
    if (problem := why_taken(host, port)) is not None:
        raise ConfigError(
            f"port {port} on {host} cannot be used: {problem}; stop the program that uses it, or choose another "
            f"with {flag} PORT"
        )


def why_taken(host: str, port: int) -> str | None:
    """Return the reason why a server cannot listen on ``host:port``, or None if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        return (e.strerror or str(e)).lower()
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        # Servers set SO_REUSEADDR too, so a port with only old connections in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as e:
            return os.strerror(e.errno or 0).lower()
    return None
