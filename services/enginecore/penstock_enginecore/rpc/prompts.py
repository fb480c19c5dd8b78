"""Prompts as vectors, from messages that have them inline or in chunks."""

import time
from collections.abc import Callable
from weakref import WeakValueDictionary

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.rpc.outputs import prompt_embeds_from_proto, taker
from penstock_common.tensors.incoming import IncomingTensors
from penstock_common.tensors.sizes import MAX_TENSOR_BYTES
from penstock_common.types.prompt_embeds import PromptEmbeds


class PromptReader:
    """Reads those of one session. Requests that refer to the same chunks get the same object."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.tensors = IncomingTensors(MAX_TENSOR_BYTES, clock)
        self._take = taker(self.tensors)
        self._shared: WeakValueDictionary[int, PromptEmbeds] = WeakValueDictionary()

    def read(self, message: pb.EngineCoreRequest) -> PromptEmbeds | None:
        """The vectors of a request's prompt; None when it has none. Raises InvalidArgument, or what became of its chunks."""
        if not message.HasField("prompt_embeds"):
            return None
        embeds = prompt_embeds_from_proto(message.prompt_embeds, message.prompt_is_token_ids, take=self._take)
        if not embeds.num_vectors(0, embeds.num_tokens):
            return None
        if message.prompt_embeds.WhichOneof("payload") == "chunks":
            return self._shared_one(message.prompt_embeds.chunks.transfer_id, embeds)
        return embeds

    def _shared_one(self, transfer_id: int, embeds: PromptEmbeds) -> PromptEmbeds:
        known = self._shared.get(transfer_id)
        if known is not None and known.data is embeds.data and known.is_alike(embeds):
            return known
        self._shared[transfer_id] = embeds
        return embeds
