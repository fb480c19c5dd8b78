"""Readers of the tensors of media and prompt embeddings in requests. A tensor is in the request itself (inline), in
chunks, or in shared memory.
"""

import re
from weakref import WeakValueDictionary

from penstock.common.v1 import tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument, ResourceExhausted, Unimplemented
from penstock_common.rpc.by_field import from_message
from penstock_common.rpc.outputs import prompt_embeds_from_proto, taker
from penstock_common.rpc.request import modality_from_proto, tensor_from_proto
from penstock_common.tensors.chunks import MAX_TENSOR_BYTES, Buffer, IncomingTensors
from penstock_common.tensors.shared_memory import SegmentReader
from penstock_common.types.media import MultiModalFeature, TensorData
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_enginecore.media.core.receiver_cache import ReceivedFeature, SessionFeatures

MAX_TENSORS = 32
"""Maximum number of tensors per media item."""
_IDENTIFIER = re.compile(r"[0-9a-f]{64}")


class FeatureReader:
    """Reads the media of one session's requests, and caches the items that the frontend asks the engine to cache.

    After each request, the request's shared-memory segments and chunks are freed, even if the request failed.
    """

    def __init__(self, tensors: IncomingTensors, kept: SessionFeatures, segments: SegmentReader | None) -> None:
        """Create a reader. ``segments`` reads the frontend's shared memory, or is None if shared memory is not
        accepted.
        """
        self.kept = kept
        self._tensors = tensors
        self._take = taker(tensors)
        self._segments = segments
        self._shared_bytes = 0
        """Number of bytes that the tensors of the current request have in shared memory."""

    def read(self, message: pb.EngineCoreRequest) -> list[MultiModalFeature]:
        """Return the media items of a request with their data.

        Raises InvalidArgument with the name of the field, the errors of ``SessionFeatures.take``, and errors of the
        tensors' transfer.
        """
        if not message.mm_features:
            return []
        self._shared_bytes = 0
        try:
            received = [
                ReceivedFeature(self._feature(feature, f"mm_features[{place}]"), feature.keep)
                for place, feature in enumerate(message.mm_features)
            ]
        except Exception:
            self.discard(message)
            raise
        return self.kept.take(received)

    def _feature(self, message: pb.MultiModalFeature, path: str) -> MultiModalFeature:
        if _IDENTIFIER.fullmatch(message.identifier) is None:
            raise InvalidArgument(
                f"{path}.identifier has {len(message.identifier)} characters; it must be 64 hexadecimal digits",
                field=f"{path}.identifier",
            )
        if len(message.data) > MAX_TENSORS:
            raise InvalidArgument(
                f"{path}.data has {len(message.data)} tensors; the limit is {MAX_TENSORS}", field=f"{path}.data"
            )
        modality = modality_from_proto(message.modality, path=f"{path}.modality")
        data = {name: self._tensor(tensor, f"{path}.data[{name[:64]}]") for name, tensor in message.data.items()}
        return from_message(message, MultiModalFeature, modality=modality, data=data)

    def _tensor(self, message: tensor_pb2.Tensor, path: str) -> TensorData:
        shared = None if self._segments is None else self._shared
        return tensor_from_proto(message, path=path, take=self._take, shared=shared)

    def _shared(self, reference: tensor_pb2.SharedMemoryReference, field: str) -> Buffer:
        if self._segments is None:
            raise Unimplemented(f"{field} is set; this engine does not accept shared memory", field=field)
        self._shared_bytes += reference.size
        if self._shared_bytes > MAX_TENSOR_BYTES:
            raise ResourceExhausted(
                f"mm_features has {self._shared_bytes} bytes in shared memory; the limit is {MAX_TENSOR_BYTES}",
                field=field,
            )
        return self._segments.read(reference.name, reference.offset, reference.size, field=field)

    def discard(self, message: pb.EngineCoreRequest) -> None:
        """Drop the media tensors of a request without reading them."""
        for feature in message.mm_features:
            for tensor in feature.data.values():
                kind = tensor.WhichOneof("payload")
                if kind == "shared_memory" and self._segments is not None:
                    self._segments.discard(tensor.shared_memory.name)
                elif kind == "chunks" and not tensor.chunks.keep:
                    self._tensors.abandon(tensor.chunks.transfer_id)


class PromptReader:
    """Reads the prompt embeddings of one session's requests. Requests that refer to the same chunks get the same
    ``PromptEmbeds`` object.
    """

    def __init__(self, tensors: IncomingTensors) -> None:
        """Create a reader. ``tensors`` has the session's tensors that arrive in chunks."""
        self.tensors = tensors
        self.segments: SegmentReader | None = None
        """Reader of the frontend's shared memory, or None if shared memory is not accepted."""
        self._take = taker(self.tensors)
        self._shared: WeakValueDictionary[int, PromptEmbeds] = WeakValueDictionary()

    def read(self, message: pb.EngineCoreRequest) -> PromptEmbeds | None:
        """Return the prompt embeddings of a request, or None if the request has none. Raises InvalidArgument, or the
        error of the embeddings' transfer.
        """
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
        """Drop the prompt embeddings of a refused request without reading them."""
        kind = message.prompt_embeds.WhichOneof("payload")
        if kind == "shared_memory" and self.segments is not None:
            self.segments.discard(message.prompt_embeds.shared_memory.name)
        elif kind == "chunks" and not message.prompt_embeds.chunks.keep:
            self.tensors.abandon(message.prompt_embeds.chunks.transfer_id)

    def _in_memory(self, reference: tensor_pb2.SharedMemoryReference, field: str) -> Buffer:
        if self.segments is None:
            raise Unimplemented(f"{field} is set; this session does not accept shared memory", field=field)
        return self.segments.read(reference.name, reference.offset, reference.size, field=field)

    def _shared_one(self, transfer_id: int, embeds: PromptEmbeds) -> PromptEmbeds:
        known = self._shared.get(transfer_id)
        if known is not None and known.data is embeds.data and known.is_alike(embeds):
            return known
        self._shared[transfer_id] = embeds
        return embeds
