"""What this machine has for services: GPUs of each engine, memory for the KV cache, and TCP ports."""

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

# What this machine has for services: GPUs of each engine, memory for the KV cache, and TCP ports.

# Looks at this machine without torch, which the command never imports.

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


LOOPBACK = "127.0.0.1"
_INTERNAL_PORTS = range(20_000, 32_000)


def free_ports(count: int, *, but: Collection[int] = ()) -> list[int]:
    """``count`` different ports of the loopback interface that nothing listens on, none of them in ``but``.

    They come from below the range that Linux gives to outgoing connections (32768 and up), any of which could otherwise
    take one before the service it is meant for listens on it.
    """
    ports: list[int] = []
    for port in random.sample(_INTERNAL_PORTS, len(_INTERNAL_PORTS)):
        if len(ports) == count:
            break
        if port not in but and why_taken(LOOPBACK, port) is None:
            ports.append(port)
    return ports


def check_host(host: str) -> None:
    """Raise ConfigError if nothing on this machine can listen on ``host``."""
    if (problem := why_taken(host, 0)) is not None:
        raise ConfigError(
            f"--host is {host!r}, on which nothing can listen here: {problem}; give an address of this machine, 127.0.0.1 for "
            "this machine's programs alone or 0.0.0.0 for every network"
        )


def check_free(host: str, port: int, *, flag: str) -> None:
    """Raise ConfigError, with ``flag`` as the way out, when ``host:port`` cannot be listened on."""
    if (problem := why_taken(host, port)) is not None:
        raise ConfigError(
            f"port {port} on {host} cannot be used: {problem}; "
            f"stop the program that has it, or choose another with {flag} PORT"
        )


def why_taken(host: str, port: int) -> str | None:
    """Why nothing can listen on ``host:port``; None when something can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        return (e.strerror or str(e)).lower()
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        # As a server does it: a port that is only waiting out the end of old connections counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as e:
            return os.strerror(e.errno or 0).lower()
    return None
