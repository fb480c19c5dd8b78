"""Prompts as vectors, from messages that have them inline, in chunks or in shared memory."""

from weakref import WeakValueDictionary

from penstock.common.v1 import tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import Unimplemented
from penstock_common.rpc.outputs import prompt_embeds_from_proto, taker
from penstock_common.tensors.incoming import IncomingTensors
from penstock_common.tensors.shared_memory import SegmentReader
from penstock_common.tensors.sizes import Buffer
from penstock_common.types.prompt_embeds import PromptEmbeds


class PromptReader:
    """Reads those of one session. Requests that refer to the same chunks get the same object."""

    def __init__(self, tensors: IncomingTensors) -> None:
        """``tensors``: those that come in chunks on the session."""
        self.tensors = tensors
        self.segments: SegmentReader | None = None
        """Reads those of the frontend; None where no shared memory is taken."""
        self._take = taker(self.tensors)
        self._shared: WeakValueDictionary[int, PromptEmbeds] = WeakValueDictionary()

    def read(self, message: pb.EngineCoreRequest) -> PromptEmbeds | None:
        """The vectors of a request's prompt; None when it has none. Raises InvalidArgument, or what became of its chunks."""
        if not message.HasField("prompt_embeds"):
            return None
        shared = None if self.segments is None else self._in_memory
        embeds = prompt_embeds_from_proto(
            message.prompt_embeds, message.prompt_is_token_ids, take=self._take, shared=shared
        )
        if not embeds.num_vectors(0, embeds.num_tokens):
            return None
        if message.prompt_embeds.WhichOneof("payload") == "chunks":
            return self._shared_one(message.prompt_embeds.chunks.transfer_id, embeds)
        return embeds

    def discard(self, message: pb.EngineCoreRequest) -> None:
        """What a request refers to that is refused: nothing else will ask for it."""
        kind = message.prompt_embeds.WhichOneof("payload")
        if kind == "shared_memory" and self.segments is not None:
            self.segments.discard(message.prompt_embeds.shared_memory.name)
        elif kind == "chunks" and not message.prompt_embeds.chunks.keep:
            self.tensors.abandon(message.prompt_embeds.chunks.transfer_id)

    def _in_memory(self, reference: tensor_pb2.SharedMemoryReference, field: str) -> Buffer:
        if self.segments is None:
            raise Unimplemented(f"{field} is set; this session takes no shared memory", field=field)
        return self.segments.read(reference.name, reference.offset, reference.size, field=field)

    def _shared_one(self, transfer_id: int, embeds: PromptEmbeds) -> PromptEmbeds:
        known = self._shared.get(transfer_id)
        if known is not None and known.data is embeds.data and known.is_alike(embeds):
            return known
        self._shared[transfer_id] = embeds
        return embeds
