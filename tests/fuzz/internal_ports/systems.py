"""The three systems whose services listen for each other, and what their streams ask for."""

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
"""Tokens of a prompt that is worth a transfer."""
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
    """Two ranks, which share experts: they meet at a store, and exchange tokens over a mesh."""
    from tests.fakes.models.tiny_models import save_tiny_model  # torch, which only this needs

    save_tiny_model("qwen3_moe", folder)
    byte_level().save(str(folder / "tokenizer.json"))
    return RankGroup(folder, size=2, expert_parallel__enabled="true", parallel__secret_file=_secret(folder))


def _nodes(folder: Path) -> Cluster:
    """An engine of two nodes, each of which has a stage of the pipeline."""
    return SpreadCluster(MODEL, engines=1, parallel__secret_file=_secret(folder))


def _transfer(folder: Path) -> Cluster:
    """An engine for prompts and one for outputs."""
    return transferring(MODEL, 2, "grpc", "prefill", "decode", parallel__secret_file=_secret(folder))


def _secret(folder: Path) -> Path:
    """The secret by which the services recognize each other, as ``penstock serve`` gives it to them."""
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
    """Every port at which one of the processes that run now, or a process that it has started, listens."""
    for name, service in services.items():
        if service.alive:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                for host, port in listening(descendants(service.pid)):
                    yield Port(name, "127.0.0.1" if host in ("0.0.0.0", "::") else host, port)


def internal(ports: Sequence[Port]) -> list[Port]:
    """Return the ports that outside clients do not use. ``tests.fuzz.connections`` covers the frontends' ports."""
    return [each for each in ports if not each.service.startswith("frontend")]


def held_by(service: Service) -> float:
    """Memory of a service and of all processes that it has started, in MiB."""
    found = 0
    for pid in descendants(service.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return found / 1024
