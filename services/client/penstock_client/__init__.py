"""Client of Penstock's public API: ``Client`` for threads, and ``AsyncClient`` for asyncio.

SamplingParams, ChatMessage, Tool and similar classes are messages of the API contract. The functions ``image``,
``audio``, ``video`` and ``message`` create media and chat messages.
"""

from penstock.common.v1.media_pb2 import Media
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.common.v1.structured_output_pb2 import StructuredOutput
from penstock.inference.v1.messages_pb2 import ChatMessage, Model, RoutingHints, Tool, ToolCall, ToolChoice
from penstock_client.async_client import AsyncClient, AsyncStream
from penstock_client.connection import Keepalive, Tls
from penstock_client.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from penstock_client.requests import audio, image, message, video
from penstock_client.results import ChatOutput, Classes, Embeddings, Logprob, Output, Scores, Usage
from penstock_client.sync_client import Client, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "ChatMessage",
    "ChatOutput",
    "Classes",
    "Client",
    "DeadlineExceeded",
    "Embeddings",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "Keepalive",
    "Logprob",
    "Media",
    "Model",
    "NotFound",
    "Output",
    "PenstockError",
    "PermissionDenied",
    "ResourceExhausted",
    "RoutingHints",
    "SamplingParams",
    "Scores",
    "Stream",
    "StructuredOutput",
    "Tls",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "audio",
    "image",
    "message",
    "video",
]
