"""Client of Penstock's public API: ``Client`` for threads, and ``AsyncClient`` for asyncio.

SamplingParams, ChatMessage, Tool and similar classes create messages of the API contract. The functions ``image``,
``audio``, ``video`` and ``message`` create media and chat messages.
"""

from penstock.inference.v1.messages_pb2 import Model
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
from penstock_client.messages import (
    ChatMessage,
    Media,
    RoutingHints,
    SamplingParams,
    StructuredOutput,
    Tool,
    ToolCall,
    ToolChoice,
)
from penstock_client.requests import audio, image, message, video
from penstock_client.results import (
    ChatOutput,
    Classes,
    Embeddings,
    Logprob,
    Output,
    Scores,
    SpeechSegment,
    Transcript,
    Usage,
)
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
    "SpeechSegment",
    "Stream",
    "StructuredOutput",
    "Tls",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "Transcript",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "audio",
    "image",
    "message",
    "video",
]
