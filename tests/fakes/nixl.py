"""NIXL agents in one process. A read is a copy, which is done after its state was queried a few times."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

LOOKS = 3
"""Number of state queries until a read is done."""


@dataclass
class _Read:
    target: int
    source: int
    size: int
    looks: int = 0
    over: bool = False


@dataclass
class FakeAgent:
    """Agent of a network. Reads of unregistered memory fail."""

    name: str
    network: "NixlNetwork"
    regions: list[tuple[int, int]] = field(default_factory=list)
    remotes: set[str] = field(default_factory=set)
    handles: list[_Read] = field(default_factory=list)

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any:
        assert mem_type == "DRAM"
        self.regions += [(address, size) for address, size, _, _ in reg_list]
        return list(self.regions)

    def deregister_memory(self, dereg_list: Any) -> None:
        for region in dereg_list:
            self.regions.remove(region)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata.decode() not in self.network.agents:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self.remotes.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, agent: str) -> None:
        self.remotes.remove(agent)

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any:
        assert mem_type == "DRAM"
        return descs

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str) -> Any:
        assert operation == "READ"
        assert remote_agent in self.remotes
        [(target, size, _)], [(source, _, _)] = local_descs, remote_descs
        for address, regions in ((target, self.regions), (source, self.network.agents[remote_agent].regions)):
            if not any(start <= address and address + size <= start + length for start, length in regions):
                raise RuntimeError("NIXL_ERR_INVALID_PARAM")
        self.handles.append(_Read(target, source, size))
        return self.handles[-1]

    def transfer(self, handle: Any) -> str:
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: Any) -> str:
        if self.network.fails:
            return "ERR"
        if self.network.stuck:
            return "PROC"
        handle.looks += 1
        if handle.looks < LOOKS:
            return "PROC"
        if not handle.over:
            handle.over = True
            ctypes.memmove(handle.target, handle.source, handle.size)
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        self.handles.remove(handle)


class NixlNetwork:
    """Network of agents. ``stuck``: reads make no progress. ``fails``: reads fail."""

    def __init__(self) -> None:
        self.agents: dict[str, FakeAgent] = {}
        self.stuck = self.fails = False

    def agent(self, name: str) -> FakeAgent:
        """Return a new agent."""
        self.agents[name] = FakeAgent(name, self)
        return self.agents[name]

    @property
    def is_clean(self) -> bool:
        """Return whether no agent has any registration left."""
        return not any(agent.regions or agent.remotes or agent.handles for agent in self.agents.values())
