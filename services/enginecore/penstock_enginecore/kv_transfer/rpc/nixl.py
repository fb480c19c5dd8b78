"""Blocks by NIXL: the engine that wants them reads them out of memory of the one that has them, whatever host that is on.

Both ends read and write memory of their own that is registered with an agent, never the pool: what becomes of a read that nobody
waits for any more concerns no block. A slot that a read writes to is used again only when that read is over.
"""

import asyncio
import ctypes
import importlib
import mmap
from collections import Counter
from typing import Any, Protocol

from penstock.kvtransfer.v1 import messages_pb2 as pb
from penstock_common.errors import FailedPrecondition, InvalidArgument
from penstock_common.tensors.chunks import Buffer
from penstock_common.tensors.shared_memory import MAX_SLOTS
from penstock_enginecore.kv_transfer.rpc.transports import Receiver, checked

_KIND = "DRAM"
_FIRST_WAIT, _LONGEST_WAIT = 0.0001, 0.002
"""Seconds between two looks at a read."""


class NixlAgent(Protocol):
    """What is used of ``nixl._api.nixl_agent``. States are DONE, PROC and ERR."""

    name: str

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any:
        """Address, bytes, device and a word of each region."""

    def deregister_memory(self, dereg_list: Any) -> None:
        """What ``register_memory`` returned."""

    def get_agent_metadata(self) -> bytes:
        """For ``add_remote_agent`` of others."""

    def add_remote_agent(self, metadata: bytes) -> str | bytes:
        """Its name."""

    def remove_remote_agent(self, agent: str) -> None:
        """Read from it no more."""

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any:
        """Address, bytes and device of each piece."""

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str) -> Any:
        """A handle."""

    def transfer(self, handle: Any) -> str:
        """Begin. The state."""

    def check_xfer_state(self, handle: Any) -> str:
        """The state."""

    def release_xfer_handle(self, handle: Any) -> None:
        """Of one that is over."""


def installed_agent(name: str) -> NixlAgent:
    """An agent of the package ``nixl``. Raises ImportError, and what the package raises."""
    agent: NixlAgent = importlib.import_module("nixl._api").nixl_agent(name)
    return agent


class NixlMemory:
    """Slots of ``slot_bytes`` each, registered with an ``agent``. Belongs to one thread."""

    def __init__(self, agent: NixlAgent, *, size: int, slot_bytes: int) -> None:
        """Raises OSError for less than a slot, and what the agent raises."""
        count = min(size // slot_bytes, MAX_SLOTS)
        if not count:
            raise OSError(f"{size} bytes hold no slot of {slot_bytes}")
        self.agent = agent
        self.name = agent.name
        self.slot_bytes = slot_bytes
        self._memory = mmap.mmap(-1, count * slot_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._num_slots = count
        self._free = list(range(count - 1, -1, -1))
        self._registered = agent.register_memory([(self._address, count * slot_bytes, 0, "")], _KIND)

    @property
    def num_used(self) -> int:
        """Slots that were taken and not given back."""
        return self._num_slots - len(self._free)

    def put(self, data: Buffer) -> int | None:
        """Take a slot for these bytes; returns their address, or None where no slot is free."""
        address = self.take()
        if address is not None:
            start = address - self._address
            self._memory[start : start + len(data)] = bytes(data)
        return address

    def take(self) -> int | None:
        """The address of a slot, None where none is free."""
        return self._address + self._free.pop() * self.slot_bytes if self._free else None

    def give_back(self, offset: int) -> None:
        """Nobody uses the slot at this address any more."""
        self._free.append((offset - self._address) // self.slot_bytes)

    def content(self, address: int, size: int) -> bytes:
        """A copy of what is there."""
        start = address - self._address
        return self._memory[start : start + size]

    def leave(self, handle: Any, address: int) -> None:
        """Give a slot back when a read into it is over: now, or later."""
        if self._registered is None:
            return
        if self.agent.check_xfer_state(handle) == "PROC":
            asyncio.get_running_loop().call_later(_LONGEST_WAIT, self.leave, handle, address)
            return
        self.agent.release_xfer_handle(handle)
        self.give_back(address)

    def close(self) -> None:
        """Deregister the memory: no read writes to it any more. Idempotent."""
        if self._registered is not None:
            self.agent.deregister_memory(self._registered)
            self._registered = None


class RemoteAgents:
    """Those that are read from, each known to the ``agent`` while anybody does."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._users: Counter[str] = Counter()

    def add(self, metadata: bytes) -> str:
        """Its name. Raises what the agent raises."""
        name = self._agent.add_remote_agent(metadata)
        text = name.decode() if isinstance(name, bytes) else name
        self._users[text] += 1
        return text

    def remove(self, name: str) -> None:
        """One that reads from it does so no more."""
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            self._agent.remove_remote_agent(name)


class NixlReceiver(Receiver):
    """Reads blocks out of the memory of the agent that ``opened`` names. Raises InvalidArgument where that is none."""

    def __init__(self, block_bytes: int, memory: NixlMemory, agents: RemoteAgents, opened: pb.Opened) -> None:
        super().__init__(block_bytes)
        self._memory = memory
        self._agents = agents
        try:
            self._remote: str | None = agents.add(opened.nixl_agent)
        except Exception as e:  # of any backend
            raise InvalidArgument(f"opened.nixl_agent cannot be used: {e}", field="opened.nixl_agent") from None

    async def data(self, block: pb.Block) -> Buffer | None:
        """See ``Receiver``; FailedPrecondition where the bytes cannot be read."""
        if block.data.WhichOneof("payload") != "shared_memory":
            return await super().data(block)
        self.check(block)
        return checked(await self._read(block.data.shared_memory.offset), block)

    def close(self) -> None:
        remote, self._remote = self._remote, None
        if remote is not None:
            self._agents.remove(remote)

    async def _slot(self) -> tuple[int, str]:
        """The address of one, once there is one, and who is read from."""
        while (name := self._remote) is not None:
            if (address := self._memory.take()) is not None:
                return address, name
            await asyncio.sleep(_LONGEST_WAIT)
        raise FailedPrecondition("the pull is over")

    async def _read(self, remote_address: int) -> bytes:
        agent, memory, size = self._memory.agent, self._memory, self._block_bytes
        wait = _FIRST_WAIT
        address, name = await self._slot()
        try:
            local = agent.get_xfer_descs([(address, size, 0)], _KIND)
            remote = agent.get_xfer_descs([(remote_address, size, 0)], _KIND)
            handle = agent.initialize_xfer("READ", local, remote, name)
            state = agent.transfer(handle)
        except Exception as e:  # of any backend
            memory.give_back(address)
            raise FailedPrecondition(f"a block cannot be read by NIXL: {e}") from None
        try:
            while state == "PROC" and self._remote is not None:
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise FailedPrecondition(f"a block cannot be read by NIXL: the read is {state}")
            return memory.content(address, size)
        finally:
            memory.leave(handle, address)
