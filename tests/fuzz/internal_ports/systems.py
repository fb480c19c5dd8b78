"""Three systems whose services connect to each other, and the requests of their streams."""

import contextlib
import itertools
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.inference.v1 import messages_pb2 as pb
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.network.sockets import descendants, listening
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster
from tests.fakes.systems.rank_group import RankGroup
from tests.fakes.systems.spread_cluster import SpreadCluster
from tests.fakes.systems.streams import greedy
from tests.fakes.systems.transferring_cluster import transferring
from tests.fuzz.variants import MODEL

_MIN_PREFILL = 48
"""Minimum number of prompt tokens for a KV transfer."""
_salts = itertools.count()


class Port(NamedTuple):
    """A port at which a process listens."""

    service: str
    host: str
    port: int

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"


class Kind(NamedTuple):
    """A kind of system. ``make`` creates it, not started, from a folder. ``request`` returns the request of a stream by
    number; ``vocab`` is its largest token id.
    """

    make: Callable[[Path], Cluster]
    vocab: int
    length: int

    def request(self, number: int, tokens: int) -> pb.GenerateRequest:
        """Return a greedy request with a prompt that is not cached."""
        prompt = random.Random(number).choices(range(10, self.vocab), k=self.length)
        request = greedy(prompt, tokens)
        request.cache_salt = str(next(_salts))
        return request


def _group(folder: Path) -> Cluster:
    """Return two expert-parallel ranks, which find each other through a store and exchange tokens over a mesh."""
    from tests.fakes.models.tiny_models import save_tiny_model  # imported here, because only this system needs torch

    save_tiny_model("qwen3_moe", folder)
    byte_level().save(str(folder / "tokenizer.json"))
    return RankGroup(folder, size=2, expert_parallel__enabled="true", parallel__secret_file=_secret(folder))


def _nodes(folder: Path) -> Cluster:
    """Return an engine on two nodes. Each node has a stage of the pipeline."""
    return SpreadCluster(MODEL, engines=1, parallel__secret_file=_secret(folder))


def _transfer(folder: Path) -> Cluster:
    """Return a prefill engine and a decode engine."""
    return transferring(MODEL, 2, "grpc", "prefill", "decode", parallel__secret_file=_secret(folder))


def _secret(folder: Path) -> Path:
    """Write the common secret of the services, like ``penstock serve`` does."""
    file = folder / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    return file


KINDS = {
    "group": Kind(_group, 250, 6),
    "nodes": Kind(_nodes, 2000, 12),
    "kv transfer": Kind(_transfer, 2000, _MIN_PREFILL),
}


def services_of(system: Cluster) -> dict[str, Service]:
    """Return the processes of the system by name. Each worker node of an engine has a separate entry."""
    found = {"coordinator": system.coordinator}
    found |= {f"engine-{number}": engine for number, engine in enumerate(system.engines)}
    found |= {f"frontend-{number}": frontend for number, frontend in enumerate(system.frontends)}
    if isinstance(system, SpreadCluster):
        found |= {f"node of engine-{number}": node for number, node in enumerate(system.nodes)}
    return found


def ports_of(services: dict[str, Service]) -> Iterator[Port]:
    """Return every port at which one of the running processes or its child processes listens."""
    for name, service in services.items():
        if service.alive:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                for host, port in listening(descendants(service.pid)):
                    yield Port(name, "127.0.0.1" if host in ("0.0.0.0", "::") else host, port)


def internal(ports: Sequence[Port]) -> list[Port]:
    """Return the ports that outside clients do not use. ``tests.fuzz.connections`` covers the frontends' ports."""
    return [each for each in ports if not each.service.startswith("frontend")]


def held_by(service: Service) -> float:
    """Return the memory of a service and its child processes in MiB."""
    found = 0
    for pid in descendants(service.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return found / 1024
