"""Transports that an engine can use to send blocks to pulling engines and to receive blocks from other engines."""

from collections.abc import Callable
from pathlib import Path

from penstock.kvtransfer.v1 import messages_pb2 as pb
from penstock_common.errors import ConfigError
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.outputs import TakeShared
from penstock_common.tensors.shared_memory import ROOT, Arena, ArenaReader, remove_orphans, shared_memory_id
from penstock_common.types.kv_transfer import KvSource
from penstock_enginecore.config import KvTransferConfig
from penstock_enginecore.kv_transfer.rpc.nixl import NixlAgent, NixlMemory, NixlReceiver, RemoteAgents, installed_agent
from penstock_enginecore.kv_transfer.rpc.transports import (
    GRPC,
    NIXL,
    SHARED_MEMORY,
    GrpcSender,
    Receiver,
    Sender,
    SlotSender,
)

log = get_logger()


class Offers:
    """The transports of one engine, and the memory that these transports need. If the memory cannot be allocated,
    blocks are sent in gRPC messages.
    """

    def __init__(
        self,
        config: KvTransferConfig,
        *,
        incarnation: str,
        block_bytes: int,
        state_bytes: int = 0,
        root: Path = ROOT,
        make_agent: Callable[[str], NixlAgent] = installed_agent,
    ) -> None:
        """Set up the transports.

        Args:
            config: Settings of KV transfer.
            incarnation: This engine's incarnation.
            block_bytes: Size of a block in bytes, or 0 for a model without attention.
            state_bytes: Size in bytes of a state of recurrent layers, or 0 for a model without recurrent layers.
            root: Directory in which shared memory is mounted.
            make_agent: Function that creates a NIXL agent by name.

        Raises:
            ConfigError: The configuration requires NIXL, but NIXL is not available.
        """
        self._config = config
        self._block_bytes = block_bytes
        self._state_bytes = state_bytes
        self._root = root
        self.shared_memory_id = ""
        """Id of the shared memory of this host, or empty if the engine uses no shared memory."""
        self._arena: Arena | None = None
        self._nixl: NixlMemory | None = None
        self._agents: RemoteAgents | None = None
        # A model without attention needs no memory, because states are sent in messages.
        if config.transport in ("auto", "shared_memory") and block_bytes:
            self._take_memory(incarnation)
        if config.transport in ("auto", "nixl") and block_bytes:
            self._join_nixl(incarnation, make_agent)
        more = [name for name, there in ((SHARED_MEMORY, self.shared_memory_id), (NIXL, self._nixl)) if there]
        self.transports = (*more, GRPC)
        """Names of the accepted transports, best first."""

    def _take_memory(self, incarnation: str) -> None:
        remove_orphans(self._root)
        self.shared_memory_id = shared_memory_id(self._root)
        if not self.shared_memory_id:
            log.warning("KV transfer cannot use shared memory; this engine uses another transport for KV blocks")
            return
        size = self._config.arena
        try:
            self._arena = Arena(incarnation, size=size, slot_bytes=self._block_bytes, root=self._root)
        except OSError as e:
            log.warning(
                "cannot allocate shared memory for KV transfer; this engine uses another transport for KV blocks",
                reason=str(e),
                kv_transfer_arena=size,
            )

    def _join_nixl(self, incarnation: str, make_agent: Callable[[str], NixlAgent]) -> None:
        asked_for = self._config.transport == NIXL
        try:
            agent = make_agent(f"penstock-{incarnation}")
            self._nixl = NixlMemory(agent, size=self._config.arena, slot_bytes=self._block_bytes)
            self._agents = RemoteAgents(agent)
        except ImportError as e:
            if asked_for:
                raise ConfigError(
                    f"kv_transfer.transport is 'nixl', but the package nixl cannot be imported ({e}); install "
                    "the package, or set kv_transfer.transport to 'auto'"
                ) from None
        except Exception as e:  # NIXL backends raise various exceptions.
            if asked_for:
                raise ConfigError(f"kv_transfer.transport is 'nixl', but NIXL cannot be used: {e}") from e
            log.warning(
                "KV transfer cannot use NIXL; this engine uses another transport for KV blocks",
                reason=str(e),
            )

    @property
    def num_slots_used(self) -> int:
        """Number of memory slots that contain blocks in flight."""
        return sum(memory.num_used for memory in (self._arena, self._nixl) if memory is not None)

    def sender(self, name: str, opening: pb.Open) -> Sender | None:
        """Return a sender for a pull with this transport, or None if the transport is not possible for this pull."""
        if name == SHARED_MEMORY and self._arena is not None and opening.shared_memory_id == self.shared_memory_id:
            return SlotSender(SHARED_MEMORY, self._arena)
        if name == NIXL and self._nixl is not None:
            return SlotSender(NIXL, self._nixl, self._nixl.agent.get_agent_metadata())
        return GrpcSender() if name == GRPC else None

    def receiver(self, opened: pb.Opened, source: KvSource) -> Receiver:
        """Return a receiver for the transport that ``source`` chose in its message ``opened``. Raises
        InvalidArgument.
        """
        if opened.transport == NIXL and self._nixl is not None and self._agents is not None:
            return NixlReceiver(self._block_bytes, self._nixl, self._agents, opened, state_bytes=self._state_bytes)
        if opened.transport != SHARED_MEMORY:
            return Receiver(self._block_bytes, state_bytes=self._state_bytes)
        reader = ArenaReader(source.incarnation, root=self._root)
        shared: TakeShared = lambda place, field: reader.read(  # noqa: E731 - it has a type
            place.name, place.offset, place.size, field=field
        )
        return Receiver(self._block_bytes, shared, closed=reader.close, state_bytes=self._state_bytes)

    def close(self) -> None:
        """Free the memory of the transports. Idempotent."""
        for memory in (self._arena, self._nixl):
            if memory is not None:
                memory.close()
