"""NIXL transport for KV blocks. The pulling engine reads blocks directly from the memory of the source engine, which
may be on another host.

Both engines register separate memory, and not the block pool, with their NIXL agents. An abandoned read therefore
cannot change a block of the pool. The target slot of a read is reused only after the read has ended.
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
from penstock_common.types.kv_transfer import STATE_GROUP
from penstock_enginecore.kv_transfer.rpc.transports import Receiver, checked

_KIND = "DRAM"
_FIRST_WAIT, _LONGEST_WAIT = 0.0001, 0.002
"""First and longest time in seconds between two checks whether a read has ended."""


class NixlAgent(Protocol):
    """Methods of ``nixl._api.nixl_agent`` that this module uses. A transfer's state is DONE, PROC or ERR."""

    name: str

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any:
        """Register memory regions, each given as address, size in bytes, device number and a string."""

    def deregister_memory(self, dereg_list: Any) -> None:
        """Deregister memory regions. The argument is the result of ``register_memory``."""

    def get_agent_metadata(self) -> bytes:
        """Return the metadata that other agents pass to ``add_remote_agent``."""

    def add_remote_agent(self, metadata: bytes) -> str | bytes:
        """Add a remote agent and return its name."""

    def remove_remote_agent(self, agent: str) -> None:
        """Remove a remote agent."""

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any:
        """Return descriptors for pieces of memory, each given as address, size in bytes and device number."""

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str) -> Any:
        """Prepare a transfer and return its handle."""

    def transfer(self, handle: Any) -> str:
        """Begin a transfer and return its state."""

    def check_xfer_state(self, handle: Any) -> str:
        """Return the state of a transfer."""

    def release_xfer_handle(self, handle: Any) -> None:
        """Release the handle of a transfer that has ended."""


def installed_agent(name: str) -> NixlAgent:
    """Create an agent of the package ``nixl``. Raises ImportError, and the package's errors."""
    agent: NixlAgent = importlib.import_module("nixl._api").nixl_agent(name)
    return agent


class NixlMemory:
    """Memory slots of ``slot_bytes`` bytes each, registered with ``agent``. Only one thread may use the object."""

    def __init__(self, agent: NixlAgent, *, size: int, slot_bytes: int) -> None:
        """Allocate and register the memory. Raises OSError if ``size`` is less than ``slot_bytes``, and errors of the
        agent.
        """
        count = min(size // slot_bytes, MAX_SLOTS)
        if not count:
            raise OSError(f"{size} bytes of memory are too small for a slot of {slot_bytes} bytes")
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
        """Number of slots in use."""
        return self._num_slots - len(self._free)

    def put(self, data: Buffer | memoryview) -> int | None:
        """Copy ``data`` to a free slot. Return the slot's address, or None if no slot is free."""
        address = self.take()
        if address is not None:
            start = address - self._address
            self._memory[start : start + len(data)] = bytes(data)
        return address

    def take(self) -> int | None:
        """Reserve a free slot. Return its address, or None if no slot is free."""
        return self._address + self._free.pop() * self.slot_bytes if self._free else None

    def give_back(self, offset: int) -> None:
        """Free the slot at the address ``offset``."""
        self._free.append((offset - self._address) // self.slot_bytes)

    def content(self, address: int, size: int) -> bytes:
        """Return a copy of ``size`` bytes at this address."""
        start = address - self._address
        return self._memory[start : start + size]

    def leave(self, handle: Any, address: int) -> None:
        """Free the slot at ``address`` once the NIXL read into the slot has ended."""
        if self._registered is None:
            return
        if self.agent.check_xfer_state(handle) == "PROC":
            asyncio.get_running_loop().call_later(_LONGEST_WAIT, self.leave, handle, address)
            return
        self.agent.release_xfer_handle(handle)
        self.give_back(address)

    def close(self) -> None:
        """Deregister the memory, so that no read in flight can write to the memory. Idempotent."""
        if self._registered is not None:
            self.agent.deregister_memory(self._registered)
            self._registered = None


class RemoteAgents:
    """Remote agents from whose memory this engine reads. An agent stays registered while at least one pull uses it."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._users: Counter[str] = Counter()

    def add(self, metadata: bytes) -> str:
        """Register a pull that uses a remote agent, and return the remote agent's name. Raises errors of NIXL."""
        name = self._agent.add_remote_agent(metadata)
        text = name.decode() if isinstance(name, bytes) else name
        self._users[text] += 1
        return text

    def remove(self, name: str) -> None:
        """Remove a pull that used a remote agent."""
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            self._agent.remove_remote_agent(name)


class NixlReceiver(Receiver):
    """Receiver that reads blocks from the memory of the agent in ``opened``. Raises InvalidArgument if that agent's
    metadata is invalid.
    """

    def __init__(
        self, block_bytes: int, memory: NixlMemory, agents: RemoteAgents, opened: pb.Opened, *, state_bytes: int = 0
    ) -> None:
        super().__init__(block_bytes, state_bytes=state_bytes)
        self._memory = memory
        self._agents = agents
        try:
            self._remote: str | None = agents.add(opened.nixl_agent)
        except Exception as e:  # NIXL backends raise various exceptions.
            raise InvalidArgument(f"opened.nixl_agent cannot be used: {e}", field="opened.nixl_agent") from None

    async def data(self, block: pb.Block) -> Buffer | None:
        """See ``Receiver``. Also raises FailedPrecondition if the bytes cannot be read."""
        if block.data.WhichOneof("payload") != "shared_memory":
            return await super().data(block)
        self.check(block)
        if block.group == STATE_GROUP:
            raise InvalidArgument(
                "block.data must be sent in messages, because the block is a recurrent state", field="block.data"
            )
        return checked(await self._read(block.data.shared_memory.offset), block)

    def close(self) -> None:
        remote, self._remote = self._remote, None
        if remote is not None:
            self._agents.remove(remote)

    async def _slot(self) -> tuple[int, str]:
        """Wait for a free slot. Return the slot's address and the name of the remote agent."""
        while (name := self._remote) is not None:
            if (address := self._memory.take()) is not None:
                return address, name
            await asyncio.sleep(_LONGEST_WAIT)
        raise FailedPrecondition("the pull has ended")

    async def _read(self, remote_address: int) -> bytes:
        agent, memory, size = self._memory.agent, self._memory, self._block_bytes
        wait = _FIRST_WAIT
        address, name = await self._slot()
        try:
            local = agent.get_xfer_descs([(address, size, 0)], _KIND)
            remote = agent.get_xfer_descs([(remote_address, size, 0)], _KIND)
            handle = agent.initialize_xfer("READ", local, remote, name)
            state = agent.transfer(handle)
        except Exception as e:  # NIXL backends raise various exceptions.
            memory.give_back(address)
            raise FailedPrecondition(f"cannot read a block with NIXL: {e}") from None
        try:
            while state == "PROC" and self._remote is not None:
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise FailedPrecondition(f"cannot read a block with NIXL: the read is in state {state}")
            return memory.content(address, size)
        finally:
            memory.leave(handle, address)
