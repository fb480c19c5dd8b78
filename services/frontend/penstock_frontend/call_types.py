"""Types of calls and of their results, shared by all protocols, and the type of the authenticated caller."""

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
    """Content of an encoded file, such as PNG, as bytes."""

    data: bytes


class Url(msgspec.Struct, frozen=True, tag=True):
    """URL of a file: ``data:``, ``https:`` or ``http:``.

    The protocol's code may add characters to the start of a ``data:`` URL. ``unwritten`` is the number of these
    characters. Positions in error messages do not count them.
    """

    url: str
    unwritten: int = 0


class Frame(msgspec.Struct, frozen=True):
    """A frame of a video: an encoded image file, and the frame's time in seconds."""

    data: bytes
    timestamp: float


class Frames(msgspec.Struct, frozen=True, tag=True):
    """A video, given as a sequence of frames."""

    frames: Sequence[Frame]


class Features(msgspec.Struct, frozen=True, tag=True):
    """Preprocessed media inputs of the model, under the names that the model's processor in transformers uses.

    If the only name is ``embeds``, the value is the output of the vision or audio encoder.
    """

    tensors: Mapping[str, TensorData]


Source = EncodedFile | Url | Frames | Features


class MediaPart(msgspec.Struct, frozen=True, kw_only=True):
    """An image, audio item or video of a request.

    Attributes:
        modality: the kind of media.
        source: the content or its URL.
        field: path of the part in the request, for error messages, such as ``messages[0].content[1].image_url``.
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
"""Predicted output from the client, as text or token ids. Engines take drafts from the prediction. The prediction does
not change the output tokens.
"""


class MixedPrompt(msgspec.Struct, frozen=True):
    """A prompt of several parts, in order."""

    parts: tuple[Part, ...]
    fields: tuple[str, ...]
    """Name of each part in the request, for error messages."""

    @property
    def text(self) -> str:
        """The text parts, concatenated."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def media(self) -> list[MediaPart]:
        """The media parts, in order."""
        return [part for part in self.parts if isinstance(part, MediaPart)]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to continue a prompt. The prompt is text, token ids, or a mixed prompt with embeddings and media."""

    prompt: str | Sequence[int] | MixedPrompt
    sampling: dict[str, Any] = {}
    """Sampling parameters that the client set, under the field names of ``SamplingParams``."""
    add_special_tokens: bool = True
    prediction: Prediction | None = None
    context: RequestContext = RequestContext()


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    """Number of output tokens that engines generated, including the tokens of a stop string."""
    accepted_draft_tokens: int = 0
    """Number of output tokens from accepted drafts, as reported by engines. Engines report this number when an attempt
    ends. Attempts without such a report do not count: the engine was lost, or a stop string or the client ended the
    attempt.
    """
    rejected_draft_tokens: int = 0
    """Number of draft tokens that the model rejected, as reported by engines."""
    reasoning_tokens: int | None = None
    """Number of completion tokens that are reasoning, including the reasoning tags. None if outputs are not parsed for
    reasoning.
    """
    media_tokens: dict[Modality, int] = {}
    """Number of prompt tokens at media positions, by modality. Modalities without media are left out."""


class Finish(msgspec.Struct, frozen=True):
    """Reason and details of the end of a sequence's output."""

    reason: FinishReason
    stop_reason: int | str | None
    """Stop string or stop token id that ended the output. None if the model ended the sequence itself."""
    usage: Usage
    kv_source: KvSource | None = None
    """Engine that keeps the KV blocks, if the request asked for this. Otherwise None."""
    kv_params: str = ""
    """Parameters from the engines' custom KV connector, as JSON text of an object, or empty without parameters."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the output of one of the ``n`` sequences, or the complete output, depending on the output kind."""

    index: int = 0
    """Index of the sequence, from 0 to ``n`` - 1."""
    text: str
    token_ids: Sequence[int]
    logprobs: Logprobs | None = None
    """Log-probabilities for each token in ``token_ids``. None if they were not requested, or if there are no tokens."""
    prompt_logprobs: Logprobs | None = None
    """Log-probabilities of the prompt, set in the first piece of sequence 0. Item i belongs to prompt token i + 1."""
    finish: Finish | None = None
    """End of the sequence, set in the last piece of the sequence."""


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message, as in OpenAI's protocol."""

    type: str
    """``text`` or ``media``; other types are refused."""
    text: str = ""
    media: MediaPart | None = None
    """Media item of the part, set if the type is ``media``."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in an assistant message."""

    id: str = ""
    name: str
    arguments: str = ""
    """Arguments as the JSON text of an object. Empty text means an empty object."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | Sequence[ContentPart] | None = None
    """Content of the message. If the model's chat template cannot read parts, the texts of the parts are joined with
    line breaks.
    """
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    """Reasoning that the assistant produced before the content of the message."""
    name: str = ""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, or None if the function has no arguments."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to continue a conversation."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    """``auto``, ``none`` or ``required``."""
    named_tool: str = ""
    """Name of the tool that the model must call, regardless of ``tool_choice``. Empty: no specific tool."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str = ""
    """Chat template for this request. Empty: use the chat template of the model."""
    template_kwargs: dict[str, Any] = {}
    """Additional variables of the chat template, such as ``enable_thinking``."""
    sampling: dict[str, Any] = {}
    """Sampling parameters that the client set, under the field names of ``SamplingParams``."""
    prediction: Prediction | None = None
    context: RequestContext = RequestContext()

    @property
    def may_call(self) -> bool:
        """True if the model may call tools.

        Otherwise the prompt contains no tools, and outputs are not parsed for tool calls.
        """
        return bool(self.tools) and (bool(self.named_tool) or self.tool_choice != "none")


Prompt = str | Sequence[int]
"""Prompt as text or as token ids. Token ids are used unchanged."""
PoolingPrompt = Prompt | MixedPrompt
"""Input of a pooling request: a prompt, or a sequence of text and media."""


Truncation = Literal["none", "end", "start"]
"""Side at which inputs of pooling requests are truncated if they are too long."""


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to embed, classify or score inputs. Each input is computed independently of the others."""

    inputs: Sequence[PoolingPrompt]
    fields: Sequence[str]
    """Name of each input in the request, for error messages, such as ``inputs[0].text``."""
    params: PoolingParams
    seconds: Sequence[str] = ()
    """Second text of each pair, for cross-encoders."""
    truncate_prompt_tokens: int | None = None
    """Maximum number of tokens of an input. Longer inputs are truncated. -1 means the model's maximum. For None, see
    ``truncation``.
    """
    truncation: Truncation | None = None
    """Side at which longer inputs are truncated. The length after truncation is ``truncate_prompt_tokens``, or the
    model's maximum without this field. ``none`` means that longer inputs are refused. None means ``end`` if
    ``truncate_prompt_tokens`` is set, and the server's ``limits.pooling_truncation`` otherwise.
    """
    add_special_tokens: bool = True
    """Whether to add special tokens. False for a rendered conversation, because the chat template adds them."""
    context: RequestContext = RequestContext()


class PoolingResult(msgspec.Struct, frozen=True):
    """Result of a PoolingRequest."""

    outputs: Sequence[EngineCoreOutput]
    """Engine output for each input, in the order of the inputs."""
    prompt_tokens: int
    """Total number of tokens of all inputs."""
    held: Held | None = None
    """Object that counts the bytes of the outputs as in flight while it exists. None if bytes are not counted."""
    media_tokens: dict[Modality, int] = {}
    """Number of prompt tokens at media positions, by modality."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to score documents against queries. There is one query for all documents, or one query per document."""

    queries: Sequence[Prompt]
    """One query, or the same number of queries as ``documents``."""
    query_fields: Sequence[str]
    """Name of each query in the request, for error messages, such as ``query.text``."""
    documents: Sequence[Prompt]
    document_fields: Sequence[str]
    use_activation: bool = True
    """Whether to apply the model's activation function. False returns raw scores, which only cross-encoders have."""
    truncate_prompt_tokens: int | None = None
    """Number of tokens to keep; see ``PoolingRequest``. The number applies to each pair for cross-encoders, and to each
    text for other models.
    """
    truncation: Truncation | None = None
    context: RequestContext = RequestContext()


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a ScoreRequest, with one score for each document."""

    request_id: str
    scores: Sequence[float]
    prompt_tokens: int
    """Total number of input tokens."""


Scope: TypeAlias = Literal["inference", "admin"]
"""Permission of a caller. ``inference`` allows the public APIs, and ``admin`` allows the operators' API."""


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated caller.

    Attributes:
        name: name of the caller, for logs.
        tenant: tenant of the caller's requests. Not used if ``any_tenant`` is True.
        any_tenant: True if the caller may act for every tenant, as gateways do.
        scopes: permissions of the caller.
    """

    name: str
    tenant: str = ""
    any_tenant: bool = False
    scopes: frozenset[Scope] = frozenset({"inference"})


current_principal: ContextVar[Principal | None] = ContextVar("current_principal", default=None)
"""Authenticated caller of the call that the current task serves, or None if authentication is off."""


def tenant_of_caller(claimed: str) -> str:
    """Return the tenant of a request.

    If the caller may act for every tenant, or if authentication is off, the tenant is ``claimed``. Otherwise it is the
    caller's own tenant.
    """
    principal = current_principal.get()
    return claimed if principal is None or principal.any_tenant else principal.tenant


def caller_named(address: str) -> str:
    """Return the caller's name for logs: the caller's tenant, or the name of its credentials, or else its address."""
    principal = current_principal.get()
    return address if principal is None else principal.tenant or principal.name
