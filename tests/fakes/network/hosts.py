"""Hosts with separate networks. A process there can be cut off like by a broken cable, without any packet as a sign.
Their name server never answers.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_BRIDGE = "penstock-hosts"
_NETWORK = "10.213.77"
_NOBODY = "02:00:00:00:00:01"
_DNS = 53


def missing() -> str:
    """Return the reason why this machine cannot create such hosts. Empty if it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None:
        return "hosts of their own need Linux, root and ip (iproute2)"
    return ""


class Host:
    """Simulated host: a network namespace with an address."""

    def __init__(self, number: int) -> None:
        self.address = f"{_NETWORK}.{number + 10}"
        self._name, self._cable = f"{_BRIDGE}-{number}", f"penstock-{number}"
        self._names = Path("/etc/netns") / self._name / "resolv.conf"

    @property
    def enter(self) -> tuple[str, ...]:
        """Return the words that, before a command, let it run on this host. The process id stays the same."""
        return "ip", "netns", "exec", self._name

    def lay(self) -> None:
        """Create the host and connect it to the network."""
        self._names.parent.mkdir(parents=True, exist_ok=True)
        self._names.write_text(f"nameserver {Hosts.own}\n")  # ip mounts this file over the machine's own
        _ip("netns", "add", self._name)
        _ip("link", "add", self._cable, "master", _BRIDGE, "type", "veth", "peer", "name", "eth0", "netns", self._name)
        _ip("link", "set", self._cable, "up")
        for words in ("link set lo up", f"address add {self.address}/24 dev eth0", "link set eth0 up"):
            _ip("-n", self._name, *words.split())

    def cut_off(self) -> None:
        """Drop all packets to and from this host."""
        _ip("link", "set", self._cable, "down")

    def connect(self) -> None:
        """Deliver packets to and from this host again."""
        _ip("link", "set", self._cable, "up")

    def lose(self, other: "Host") -> None:
        """Drop all packets from this host to another one."""
        _ip(
            "-n",
            self._name,
            "neighbour",
            "replace",
            other.address,
            "lladdr",
            _NOBODY,
            "nud",
            "permanent",
            "dev",
            "eth0",
        )

    def find(self, other: "Host") -> None:
        """Deliver packets to the other host again."""
        _ip("-n", self._name, "neighbour", "delete", other.address, "dev", "eth0")

    def remove(self) -> None:
        """Remove the host. Idempotent."""
        _ip("netns", "delete", self._name, fails=True)
        shutil.rmtree(self._names.parent, ignore_errors=True)


class Hosts:
    """``count`` hosts on one network. This machine is also on the network, with the address ``own``."""

    own = f"{_NETWORK}.1"

    def __init__(self, count: int) -> None:
        self.hosts = [Host(number) for number in range(count)]

    def questions(self) -> list[bytes]:
        """Return the queries that the hosts have sent to their name server since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._questions.recv(512))
        return found

    def __enter__(self) -> "Hosts":
        self._remove()  # remove leftovers of a run that was killed
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("address", "add", f"{self.own}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        for host in self.hosts:
            host.lay()
        self._questions = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._questions.setblocking(False)
        self._questions.bind((self.own, _DNS))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._questions.close()
        self._remove()

    def _remove(self) -> None:
        for host in self.hosts:
            host.remove()
        _ip("link", "delete", _BRIDGE, fails=True)


def _ip(*words: str, fails: bool = False) -> None:
    """Run an ``ip`` command. ``fails``: whether it may fail, because there may be nothing to do."""
    subprocess.run(["ip", *words], check=not fails, stderr=subprocess.DEVNULL if fails else None)
