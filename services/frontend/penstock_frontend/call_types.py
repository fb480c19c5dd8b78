"""Types of calls and their results, for all protocols, and the authenticated caller."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

import msgspec

from penstock_common.in_flight import Held
from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.media import Modality, TensorData
from penstock_common.types.outputs import EngineCoreOutput, FinishReason, Logprobs
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import PoolingParams, RequestContext


class EncodedFile(msgspec.Struct, frozen=True, tag=True):
    """The bytes of an encoded file."""

    data: bytes


class Url(msgspec.Struct, frozen=True, tag=True):
    """URL of a file: ``data:``, ``https:`` or ``http:``.

    ``unwritten`` is the number of characters at the start of a ``data:`` URL that the protocol's code added. Errors
    count positions without them.
    """

    url: str
    unwritten: int = 0


class Frame(msgspec.Struct, frozen=True):
    """A frame of a video: an encoded image file, and its time in seconds."""

    data: bytes
    timestamp: float


class Frames(msgspec.Struct, frozen=True, tag=True):
    """A video as a sequence of frames."""

    frames: Sequence[Frame]


class Features(msgspec.Struct, frozen=True, tag=True):
    """Preprocessed inputs of the model, by the names of its processor in transformers. ``embeds`` alone has the
    encoder's output.
    """

    tensors: Mapping[str, TensorData]


Source = EncodedFile | Url | Frames | Features


class MediaPart(msgspec.Struct, frozen=True, kw_only=True):
    """An image, audio item or video of a request.

    Attributes:
        modality: the kind of media.
        source: the content or its URL.
        field: its path in the request, for errors, such as ``messages[0].content[1].image_url``.
        processor_kwargs: additional arguments of the model's processor.
    """

    modality: Modality
    source: Source
    field: str
    processor_kwargs: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the client sent."""
        match self.source:
            case EncodedFile(data):
                return len(data)
            case Url(url=url):
                return len(url)
            case Frames(frames):
                return sum(len(frame.data) for frame in frames)
            case Features(tensors):
                return sum(len(tensor.data) for tensor in tensors.values())


Part = str | Sequence[int] | PromptEmbeds | MediaPart
Prediction = str | Sequence[int]
"""Predicted output from the client: text or token ids. Drafts are looked up in it; it changes no output token."""


class MixedPrompt(msgspec.Struct, frozen=True):
    """A prompt of several parts, in order."""

    parts: tuple[Part, ...]
    fields: tuple[str, ...]
    """Name of each part in the request, for errors."""

    @property
    def text(self) -> str:
        """The text parts, concatenated."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def media(self) -> list[MediaPart]:
        """The media parts, in order."""
        return [part for part in self.parts if isinstance(part, MediaPart)]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to continue: text, token ids, or a mixed prompt with embeddings and media."""

    prompt: str | Sequence[int] | MixedPrompt
    sampling: dict[str, Any] = {}
    """The sampling parameters that the client set, under the names of ``SamplingParams``."""
    add_special_tokens: bool = True
    prediction: Prediction | None = None
    context: RequestContext = RequestContext()


class Usage(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    """Output tokens of the engine, including those of a stop string."""
    accepted_draft_tokens: int = 0
    """Output tokens that came from accepted drafts, as reported by engines. An attempt does not count if its engine was
    lost, or if a stop string or the client ended it, because its engine reported nothing.
    """
    rejected_draft_tokens: int = 0
    """Draft tokens that the model rejected, as reported by engines."""
    reasoning_tokens: int | None = None
    """Completion tokens that are reasoning, including its tags, or None if outputs are not parsed for reasoning."""
    media_tokens: dict[Modality, int] = {}
    """Prompt tokens at media positions, by modality. Modalities without media are left out."""


class Finish(msgspec.Struct, frozen=True):
    """End of an output."""

    reason: FinishReason
    stop_reason: int | str | None
    """The stop string or the stop token's id, or None at the model's own end of sequence."""
    usage: Usage
    kv_source: KvSource | None = None
    """Engine that keeps the KV blocks, if that was requested."""
    kv_params: str = ""
    """Parameters from the engines' own KV connector, as a JSON object; empty: none."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one of the n sequences, or all of it, depending on the output kind."""

    index: int = 0
    """Index of the sequence."""
    text: str
    token_ids: Sequence[int]
    logprobs: Logprobs | None = None
    """Log-probabilities for each of ``token_ids``; None if not requested, or without tokens."""
    prompt_logprobs: Logprobs | None = None
    """Set on the first piece of sequence 0. Position i belongs to prompt token i + 1."""
    finish: Finish | None = None
    """Set on the last piece of its sequence."""


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message, as in OpenAI's protocol."""

    type: str
    """``text`` or ``media``; other types are refused."""
    text: str = ""
    media: MediaPart | None = None
    """Set if the type is ``media``."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call that an assistant made."""

    id: str = ""
    name: str
    arguments: str = ""
    """A JSON object as text; an empty text stands for an empty object."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | Sequence[ContentPart] | None = None
    """Content of the message. The texts of parts are joined with line breaks, unless the model's chat template reads
    parts.
    """
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    """Reasoning of the assistant before its content."""
    name: str = ""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, or None if it takes none."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to continue."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    """``auto``, ``none`` or ``required``."""
    named_tool: str = ""
    """Tool that must be called, regardless of ``tool_choice``; empty: none."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str = ""
    """Chat template that replaces the model's own; empty: the model's."""
    template_kwargs: dict[str, Any] = {}
    """Additional variables of the chat template, such as ``enable_thinking``."""
    sampling: dict[str, Any] = {}
    """The sampling parameters that the client set, under the names of ``SamplingParams``."""
    prediction: Prediction | None = None
    context: RequestContext = RequestContext()

    @property
    def may_call(self) -> bool:
        """True if the model may call tools. Otherwise it does not see them, and outputs are not parsed for calls."""
        return bool(self.tools) and (bool(self.named_tool) or self.tool_choice != "none")


Prompt = str | Sequence[int]
"""Text, or token ids that are used unchanged."""
PoolingPrompt = Prompt | MixedPrompt
"""A prompt, or a sequence of text and media."""


Truncation = Literal["none", "end", "start"]
"""End at which too long inputs of pooling requests are truncated."""


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs to embed, classify or score, independently of each other."""

    inputs: Sequence[PoolingPrompt]
    fields: Sequence[str]
    """Name of each input in the request, for errors, such as ``inputs[0].text``."""
    params: PoolingParams
    seconds: Sequence[str] = ()
    """Second text of every pair, for cross-encoders."""
    truncate_prompt_tokens: int | None = None
    """Maximum tokens of an input; longer inputs are truncated. -1: the model's maximum. None: see ``truncation``."""
    truncation: Truncation | None = None
    """End at which longer inputs are truncated, to ``truncate_prompt_tokens`` or else to the model's maximum. ``none``:
    longer inputs are refused. None: the end if ``truncate_prompt_tokens`` is set, otherwise the server's
    ``limits.pooling_truncation``.
    """
    add_special_tokens: bool = True
    """False for a rendered conversation, whose template adds them."""
    context: RequestContext = RequestContext()


class PoolingResult(msgspec.Struct, frozen=True):
    """Result of a PoolingRequest."""

    outputs: Sequence[EngineCoreOutput]
    """Engine output of each input, in order."""
    prompt_tokens: int
    """Number of tokens of all inputs."""
    held: Held | None = None
    """Counts the bytes of the outputs while it exists, or None if bytes are not counted."""
    media_tokens: dict[Modality, int] = {}
    """Prompt tokens at media positions, by modality."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Queries and documents to score: one query for all documents, or one query per document."""

    queries: Sequence[Prompt]
    """One query, or as many as ``documents``."""
    query_fields: Sequence[str]
    """Name of each query in the request, for errors, such as ``query.text``."""
    documents: Sequence[Prompt]
    document_fields: Sequence[str]
    use_activation: bool = True
    """False: the model's raw scores. Only for cross-encoders."""
    truncate_prompt_tokens: int | None = None
    """Number of tokens to keep, see PoolingRequest. Applies to each pair for cross-encoders, otherwise to each text."""
    truncation: Truncation | None = None
    context: RequestContext = RequestContext()


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a ScoreRequest: a score for each document."""

    request_id: str
    scores: Sequence[float]
    prompt_tokens: int
    """Number of tokens that the model read."""


Scope: TypeAlias = Literal["inference", "admin"]
"""Permission of a caller: the public APIs, or the operators' API."""


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated caller.

    Attributes:
        name: its name, for logs.
        tenant: the tenant of its requests, unless ``any_tenant``.
        any_tenant: it may act for every tenant, as gateways do.
        scopes: its permissions.
    """

    name: str
    tenant: str = ""
    any_tenant: bool = False
    scopes: frozenset[Scope] = frozenset({"inference"})


current_principal: ContextVar[Principal | None] = ContextVar("current_principal", default=None)
"""Caller of the call that this task serves, or None if authentication is off."""


def tenant_of_caller(claimed: str) -> str:
    """Return the tenant of a request: the caller's own tenant, or ``claimed`` if the caller may act for others."""
    principal = current_principal.get()
    return claimed if principal is None or principal.any_tenant else principal.tenant


def caller_named(address: str) -> str:
    """Return the caller's name for logs: its tenant or the name of its credentials, otherwise its address."""
    principal = current_principal.get()
    return address if principal is None else principal.tenant or principal.name
