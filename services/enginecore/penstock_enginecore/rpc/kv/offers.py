"""Which transports an engine offers to those that pull from it, and takes from those that it pulls from."""

from pathlib import Path

from penstock.kvtransfer.v1 import messages_pb2 as pb
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.outputs import TakeShared
from penstock_common.tensors.arena import Arena, ArenaReader
from penstock_common.tensors.shared_memory import ROOT, remove_orphans, shared_memory_id
from penstock_common.types.kv_transfer import KvSource
from penstock_enginecore.config import KvTransferConfig
from penstock_enginecore.rpc.kv.receiver import Receiver
from penstock_enginecore.rpc.kv.transports import GRPC, SHARED_MEMORY, ArenaSender, GrpcSender, Sender

log = get_logger()


class Offers:
    """Those of an engine of one ``incarnation``. Takes the shared memory; where that cannot be had it does without."""

    def __init__(self, config: KvTransferConfig, *, incarnation: str, block_bytes: int, root: Path = ROOT) -> None:
        self._block_bytes = block_bytes
        self._root = root
        self.shared_memory_id = ""
        """Names the memory that others of this host see as well; empty: none is used."""
        self._arena: Arena | None = None
        if config.transport in ("auto", "shared_memory"):
            self._take_memory(config, incarnation)
        self.transports = (SHARED_MEMORY, GRPC) if self.shared_memory_id else (GRPC,)
        """What it takes, best first."""

    def _take_memory(self, config: KvTransferConfig, incarnation: str) -> None:
        remove_orphans(self._root)
        self.shared_memory_id = shared_memory_id(self._root)
        if not self.shared_memory_id:
            log.warning("there is no shared memory that can be used; blocks go in messages")
            return
        try:
            self._arena = Arena(incarnation, size=config.arena, slot_bytes=self._block_bytes, root=self._root)
        except OSError as e:
            log.warning(
                "shared memory cannot be had; blocks go in messages", why=str(e), kv_transfer_arena=config.arena
            )

    @property
    def num_slots_used(self) -> int:
        """Of the shared memory, by blocks on their way."""
        return 0 if self._arena is None else self._arena.num_used

    def sender(self, name: str, opening: pb.Open) -> Sender | None:
        """What sends to one that opens a pull on that transport; None where that cannot be."""
        if name == GRPC:
            return GrpcSender()
        if name == SHARED_MEMORY and self._arena is not None and opening.shared_memory_id == self.shared_memory_id:
            return ArenaSender(self._arena)
        return None

    def receiver(self, opened: pb.Opened, source: KvSource) -> Receiver:
        """What takes what comes from ``source`` on the transport that it has chosen."""
        if opened.transport != SHARED_MEMORY:
            return Receiver(self._block_bytes)
        reader = ArenaReader(source.incarnation, root=self._root)
        shared: TakeShared = lambda place, field: reader.read(  # noqa: E731 - it has a type
            place.name, place.offset, place.size, field=field
        )
        return Receiver(self._block_bytes, shared, close=reader.close)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._arena is not None:
            self._arena.close()
