"""System for hostile connections: the system of the other fuzz tests, and a frontend that requires API keys."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from tests.fakes.network.ports import free_port
from tests.fakes.network.sockets import connections
from tests.fuzz.system import Held, Probed, System
from tests.fuzz.variants import NAME, VARIANTS

_TIMEOUTS = {"http__header_timeout": 2, "http__body_timeout": 3}
"""Timeouts in seconds. The frontend refuses some slow clients, and other slow clients leave earlier."""


class Amounts(msgspec.Struct, frozen=True):
    """Resources of a process, with both ends of each of its connections."""

    held: Held
    connections: frozenset[str]


class ListeningSystem(System):
    """The system: ``async with ListeningSystem()``. All services answer when the block begins."""

    def __init__(self) -> None:
        super().__init__(VARIANTS["plain"])
        for name, value in _TIMEOUTS.items():
            self.frontend.add_flag(name.replace("__", ".").replace("_", "-"), value)
        keys = Path(self._folder.name, "keys")
        keys.write_text("sk-fuzz-0123456789 name=fuzz tenant=fuzz\n")
        self._guarded_port = free_port()
        self._guarded = self._frontend(
            "guarded frontend",
            Path(self._folder.name, NAME),
            self._guarded_port,
            free_port(),
            frontend_id="guarded",
            auth__api_keys=keys,
            **_TIMEOUTS,
        )
        self._guarded.environment["TMPDIR"] = self._temporary.name

    @property
    def services(self) -> list[Probed]:
        """Return all services."""
        return [*super().services, self._guarded] if hasattr(self, "_guarded") else super().services

    @property
    def ports(self) -> Mapping[str, tuple[str, int]]:
        """Return host and port by the port names of scripts."""
        found = {"http": ("127.0.0.1", self.http_port), "guarded": ("127.0.0.1", self._guarded_port)}
        for name, address in self.addresses.items():
            host, _, port = address.rpartition(":")
            found[name] = (host, int(port))
        return found

    def amounts(self) -> dict[str, Amounts]:
        """Return the current resources of each process by name."""
        held = self.held()
        return {
            service.service: Amounts(held[service.service], frozenset(connections(service.pid)))
            for service in self.services
        }
