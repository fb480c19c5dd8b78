"""The two ends of a session's media transfer, without gRPC. Messages of each end wait in a queue until they are
delivered.
"""

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import RequestFailed
from penstock_common.rpc.handshake import PROTOCOL_REVISION
from penstock_common.rpc.outputs import take_chunk
from penstock_common.tensors.chunks import IncomingTensors, Limits
from penstock_common.tensors.shared_memory import SegmentReader
from penstock_common.types.media import MultiModalFeature, TensorData
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs, EngineReady, FinishReason, RequestError
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.media.core.receiver_cache import ReceiverCache
from penstock_enginecore.rpc.request_tensors import FeatureReader
from penstock_frontend.rpc.engine_session import OutgoingRequests
from penstock_frontend.rpc.media_transport import MediaTransport
from penstock_frontend.rpc.tensor_sender import MediaMirror

MEMORY_ID = "the same memory"


def item(name: str, *sizes: int, offset: int = 0, length: int = 1) -> MultiModalFeature:
    """Return a feature with tensors of these sizes in bytes. Their content depends only on name and size."""
    data = {f"t{place}": tensor_of(f"{name}/{place}", size) for place, size in enumerate(sizes)}
    return MultiModalFeature(modality="image", identifier=identifier_of(name), offset=offset, length=length, data=data)


def identifier_of(name: str) -> str:
    """Return the identifier of the item with this name."""
    return blake2b(name.encode(), digest_size=32).hexdigest()


def tensor_of(name: str, size: int) -> TensorData:
    """Return a tensor whose bytes depend only on name and size."""
    digest = blake2b(name.encode()).digest()
    return TensorData(dtype="uint8", shape=(size,), data=(digest * (size // len(digest) + 1))[:size])


def request_of(request_id: str, *features: MultiModalFeature) -> EngineCoreRequest:
    """Return a request with these media."""
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=[1], mm_features=list(features))


def ready_of(quota: int, *, memory_id: str = "", max_tensor_bytes: int = 4096) -> EngineReady:
    """Return the engine's ready message."""
    return EngineReady(
        engine_id="e",
        incarnation="1",
        model="m",
        max_model_len=64,
        num_kv_blocks=8,
        block_size=4,
        vocab_size=8,
        max_tensor_bytes=max_tensor_bytes,
        receiver_cache_bytes=quota,
        shared_memory_id=memory_id,
    )


class MediaSessionPair:
    """A stream with both ends. ``received``: features that the engine has received, by request.

    ``refused``: requests that ended with an error outside the session. ``spoil``: reasons, by request id, with which
    the engine's end refuses the next message of a request before it reads the message.
    """

    def __init__(
        self,
        cache: ReceiverCache,
        *,
        limits: Limits = Limits(2048, 4096),  # noqa: B008 - it is immutable
        transport: MediaTransport | None = None,
        incarnation: str = "f",
        root: Path | None = None,
    ) -> None:
        self.up: deque[tuple[pb.SessionRequest, frozenset[str], int]] = deque()
        """Messages in transit, each with the state of the mirror when the message was created."""
        self.down: deque[EngineCoreOutputs | None] = deque()
        """Outputs in transit. None represents ``media_cleared``."""
        self.received: dict[str, list[MultiModalFeature]] = {}
        self.refused: dict[str, RequestError] = {}
        self.spoil: dict[str, RequestFailed] = {}
        self.cache = cache
        self.kept = cache.session()
        self.tensors = IncomingTensors(limits.max_tensor_bytes)
        segments = None if root is None else SegmentReader(incarnation, root=root)
        self._reader = FeatureReader(self.tensors, self.kept, segments)
        self.out = OutgoingRequests(
            transport or MediaTransport(incarnation, memory_id=""),
            on_refused=self._take_refusals,
            max_message_bytes=limits.max_message_bytes,
        )
        memory_id = "" if root is None else MEMORY_ID
        ready = ready_of(cache.quota, memory_id=memory_id, max_tensor_bytes=limits.max_tensor_bytes)
        self.out.greeted(ready, limits, PROTOCOL_REVISION)
        self._limits = limits

    @property
    def mirror(self) -> MediaMirror:
        """Mirror of the frontend."""
        assert self.out.mirror is not None
        return self.out.mirror

    def send(self) -> bool:
        """Create the next messages. Returns whether any were created."""
        if not self.out:
            return False
        for message in self.out.next():
            assert message.ByteSize() <= self._limits.max_message_bytes
            self.up.append((message, self.mirror.identifiers, self.mirror.num_bytes))
        return True

    def deliver(self) -> bool:
        """Let the engine read the next message. Returns whether there was a message."""
        if not self.up:
            return False
        message, _, _ = self.up.popleft()
        match message.WhichOneof("message"):
            case "add":
                self._add(message.add)
            case "tensor_chunk":
                take_chunk(self.tensors, message.tensor_chunk)
            case "drop_media":
                self.kept.drop(message.drop_media.identifiers)
        return True

    def hear(self) -> bool:
        """Deliver the engine's next message to the frontend. Returns whether there was one."""
        if not self.down:
            return False
        outputs = self.down.popleft()
        if outputs is None:
            self.out.media_cleared()
            return True
        self.out.take(outputs)
        self._take_refusals(outputs)
        return True

    def settle(self) -> None:
        """Deliver messages until none is in transit."""
        while self.send() or self.deliver() or self.hear():
            pass

    def clear(self) -> None:
        """Clear the engine's media cache."""
        self.cache.clear()
        self.down.append(None)

    def end(self, request_id: str) -> None:
        """End a request on the engine."""
        del self.received[request_id]
        output = EngineCoreOutput(request_id=request_id, finish_reason=FinishReason.STOP)
        self.down.append(EngineCoreOutputs(outputs=[output]))

    def close(self) -> None:
        """Break the stream."""
        self.kept.clear()
        self.out.close()

    def _add(self, message: pb.EngineCoreRequest) -> None:
        try:
            if (error := self.spoil.pop(message.request_id, None)) is not None:
                self._reader.discard(message)
                raise error
            self.received[message.request_id] = self._reader.read(message)
        except RequestFailed as e:
            output = EngineCoreOutput(
                request_id=message.request_id,
                attempt=message.attempt,
                finish_reason=FinishReason.ERROR,
                error=RequestError.from_exception(e),
            )
            self.down.append(EngineCoreOutputs(outputs=[output]))

    def _take_refusals(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            if output.error is not None:
                self.refused[output.request_id] = output.error


def assert_same(received: Sequence[MultiModalFeature], sent: Sequence[MultiModalFeature]) -> None:
    """Check that the engine has the frontend's media, byte for byte."""
    assert [(f.identifier, f.offset, f.length) for f in received] == [(f.identifier, f.offset, f.length) for f in sent]
    for one, other in zip(received, sent, strict=True):
        assert {name: (t.dtype, t.shape, bytes(t.data)) for name, t in one.data.items()} == {
            name: (t.dtype, t.shape, bytes(t.data)) for name, t in other.data.items()
        }
