"""Types of calls and of their results, shared by all protocols. The type of the authenticated caller is also here."""

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
    """Bytes of an encoded file, such as a PNG file."""

    data: bytes


class Url(msgspec.Struct, frozen=True, tag=True):
    """URL of a file: ``data:``, ``https:`` or ``http:``.

    The code of a protocol may add characters to the start of a ``data:`` URL that the client did not write.
    ``unwritten`` is the number of these characters. Positions in error messages are counted without them.
    """

    url: str
    unwritten: int = 0


class Frame(msgspec.Struct, frozen=True):
    """A frame of a video: an encoded image file, and the time of the frame in the video, in seconds."""

    data: bytes
    timestamp: float


class Frames(msgspec.Struct, frozen=True, tag=True):
    """A video, given as a sequence of frames."""

    frames: Sequence[Frame]


class Features(msgspec.Struct, frozen=True, tag=True):
    """Preprocessed media inputs of the model, by the names that the model's processor in transformers uses.

    If the only name is ``embeds``, the value is the output of the model's vision or audio encoder.
    """

    tensors: Mapping[str, TensorData]


Source = EncodedFile | Url | Frames | Features


class MediaPart(msgspec.Struct, frozen=True, kw_only=True):
    """An image, audio item or video in a request.

    Attributes:
        modality: the kind of media.
        source: the content of the media item, or its URL.
        field: path of the media item in the request, for error messages, such as ``messages[0].content[1].image_url``.
        processor_kwargs: additional arguments for the model's processor in transformers.
    """

    modality: Modality
    source: Source
    field: str
    processor_kwargs: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the client sent for this media item."""
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
"""Predicted output from the client, as text or token ids. Engines use the prediction as a source of drafts (speculative
decoding). The prediction does not change the output tokens.
"""


class MixedPrompt(msgspec.Struct, frozen=True):
    """A prompt that consists of several parts (text, token ids, embeddings and media), in order."""

    parts: tuple[Part, ...]
    fields: tuple[str, ...]
    """Path of each part in the request, for error messages."""

    @property
    def text(self) -> str:
        """All text parts of the prompt, joined without separators."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def media(self) -> list[MediaPart]:
        """All media parts of the prompt, in order."""
        return [part for part in self.parts if isinstance(part, MediaPart)]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to generate a continuation of a prompt. The prompt is text, token ids, or a mixed prompt with embeddings
    and media.
    """

    prompt: str | Sequence[int] | MixedPrompt
    sampling: dict[str, Any] = {}
    """Sampling parameters that the client set, by the field names of ``SamplingParams``."""
    add_special_tokens: bool = True
    prediction: Prediction | None = None
    context: RequestContext = RequestContext()


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request, for the client's bill and statistics."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    """Number of output tokens that engines generated, including the tokens of a stop string that is not in the output."""
    accepted_draft_tokens: int = 0
    """Number of output tokens that were accepted drafts (speculative decoding), as engines report it. Engines report
    this number when an attempt ends. The number therefore lacks the drafts of attempts whose engine was lost, and of
    attempts that a stop string or the client ended.
    """
    rejected_draft_tokens: int = 0
    """Number of draft tokens that the model rejected (speculative decoding), as engines report it."""
    reasoning_tokens: int | None = None
    """Number of completion tokens that are reasoning, including the reasoning tags. None if the outputs are not parsed
    for reasoning.
    """
    media_tokens: dict[Modality, int] = {}
    """Number of prompt tokens that stand for media, by modality. Modalities of which the request has no media are left
    out.
    """


class Finish(msgspec.Struct, frozen=True):
    """Reason for which the output of a sequence ended, and details of the end."""

    reason: FinishReason
    stop_reason: int | str | None
    """Stop string or stop token id at which the output ended. None if the output did not end at a stop string or stop
    token id.
    """
    usage: Usage
    kv_source: KvSource | None = None
    """Engine that keeps the KV blocks of the sequence, if the request asked for this. Otherwise None."""
    kv_params: str = ""
    """Parameters from the custom KV connector of the engines, as the JSON text of an object. Empty if there are no
    parameters.
    """


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one of the ``n`` sequences of a request. The output kind of the request decides whether this is a new
    piece or the whole output so far.
    """

    index: int = 0
    """Index of the sequence, from 0 to ``n`` - 1."""
    text: str
    token_ids: Sequence[int]
    logprobs: Logprobs | None = None
    """Log-probabilities for each token in ``token_ids``. None if the request did not ask for them, or if ``token_ids``
    is empty.
    """
    prompt_logprobs: Logprobs | None = None
    """Log-probabilities of the prompt tokens, set only in the first piece of sequence 0. Item i belongs to prompt token
    i + 1.
    """
    finish: Finish | None = None
    """Details of the sequence's end, set only in its last piece."""


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message of a conversation, as in OpenAI's protocol."""

    type: str
    """Kind of the part: ``text`` or ``media``. Other kinds are refused."""
    text: str = ""
    media: MediaPart | None = None
    """Media item of the part. Set only if the type is ``media``."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in an assistant message of the conversation."""

    id: str = ""
    name: str
    arguments: str = ""
    """Arguments of the tool call, as the JSON text of an object. An empty text means an empty object."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | Sequence[ContentPart] | None = None
    """Content of the message. If the model's chat template cannot read parts, the frontend joins the texts of the parts
    with line breaks.
    """
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    """Reasoning text that the assistant generated before the content of the message."""
    name: str = ""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """JSON schema of the function's arguments. None if the function has no arguments."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to generate the next message of a conversation."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    """Whether the model may or must call tools: ``auto``, ``none`` or ``required``."""
    named_tool: str = ""
    """Name of the tool that the model must call, whatever ``tool_choice`` is. Empty if the request names no tool."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str = ""
    """Chat template for this request. Empty means the chat template of the model."""
    template_kwargs: dict[str, Any] = {}
    """Additional variables for the chat template, such as ``enable_thinking``."""
    sampling: dict[str, Any] = {}
    """Sampling parameters that the client set, by the field names of ``SamplingParams``."""
    prediction: Prediction | None = None
    context: RequestContext = RequestContext()

    @property
    def may_call(self) -> bool:
        """True if the model may call tools. If the value is False, the prompt contains no tools, and the outputs are
        not parsed for tool calls.
        """
        return bool(self.tools) and (bool(self.named_tool) or self.tool_choice != "none")


Prompt = str | Sequence[int]
"""Prompt as text or as token ids. The frontend does not change token ids."""
PoolingPrompt = Prompt | MixedPrompt
"""Input of a pooling request: a prompt, or a mixed prompt of text and media."""


Truncation = Literal["none", "end", "start"]
"""Side at which inputs of pooling requests are truncated if they are too long."""


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to compute embeddings, classes or scores of inputs. Each input is computed independently of the others."""

    inputs: Sequence[PoolingPrompt]
    fields: Sequence[str]
    """Path of each input in the request, for error messages, such as ``inputs[0].text``."""
    params: PoolingParams
    seconds: Sequence[str] = ()
    """Second text of each pair of texts, for cross-encoders."""
    truncate_prompt_tokens: int | None = None
    """Maximum number of tokens of an input. Longer inputs are truncated. -1 means the model's maximum. If the value is
    None, ``truncation`` decides.
    """
    truncation: Truncation | None = None
    """Side at which longer inputs are truncated. The length after truncation is ``truncate_prompt_tokens``, or the
    model's maximum if this field is not set. ``none`` means that longer inputs are refused. None means the tokenizer's
    side if ``truncate_prompt_tokens`` is set, and otherwise the server's setting ``limits.pooling_truncation``.
    """
    add_special_tokens: bool = True
    """Whether the tokenizer adds special tokens to the inputs. False for a rendered conversation, because the chat
    template adds them.
    """
    prompt: str | None = None
    """Text that is added before each input of an embedding request. None means the model's default prompt, which is not
    added to token ids.
    """
    num_queries: int | None = None
    """Number of inputs, from the first, that are queries of a late-interaction model. The other inputs are documents.
    None means that inputs get no markers of queries or documents.
    """
    context: RequestContext = RequestContext()


class PoolingResult(msgspec.Struct, frozen=True):
    """Result of a PoolingRequest."""

    outputs: Sequence[EngineCoreOutput]
    """Engine output of each input, in the order of the inputs."""
    prompt_tokens: int
    """Total number of prompt tokens of all inputs."""
    held: Held | None = None
    """Object that counts the bytes of the outputs as in flight as long as the object exists. None if these bytes are
    not counted.
    """
    media_tokens: dict[Modality, int] = {}
    """Number of prompt tokens that stand for media, by modality."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to compute how well documents match queries. There is one query for all documents, or one query for each
    document.
    """

    queries: Sequence[Prompt]
    """One query, or the same number of queries as ``documents``."""
    query_fields: Sequence[str]
    """Path of each query in the request, for error messages, such as ``query.text``."""
    documents: Sequence[Prompt]
    document_fields: Sequence[str]
    use_activation: bool = True
    """Whether to apply the activation function of the model to the scores. If the value is False, the scores are raw,
    which only cross-encoders support.
    """
    truncate_prompt_tokens: int | None = None
    """Number of tokens to keep, with the same values as in ``PoolingRequest``. For cross-encoders, the number applies
    to each pair of texts. For other models, it applies to each text.
    """
    truncation: Truncation | None = None
    query_prompt: str | None = None
    """Text that is added before each query. A model that generates scores gets it as an instruction instead. None means
    the model's prompt for queries if the model embeds, and otherwise its default prompt.
    """
    document_prompt: str | None = None
    """Text that an embedding model adds before each document. None means its prompt for documents."""
    max_query_tokens: int | None = None
    """Maximum number of tokens of each query, without prompts. Longer queries are truncated at their end. None means no
    limit.
    """
    max_document_tokens: int | None = None
    """Maximum number of tokens of each document, as for queries."""
    context: RequestContext = RequestContext()


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a ScoreRequest: one score for each document."""

    request_id: str
    scores: Sequence[float]
    prompt_tokens: int
    """Total number of tokens of all inputs."""


Scope: TypeAlias = Literal["inference", "admin"]
"""Permission of a caller. ``inference`` allows the public APIs, and ``admin`` allows the operators' API."""


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated caller.

    Attributes:
        name: name of the caller in logs.
        tenant: tenant of the caller's requests. This field is not used if ``any_tenant`` is True.
        any_tenant: True if the caller may choose the tenant of each request, as gateways do.
        scopes: permissions of the caller.
    """

    name: str
    tenant: str = ""
    any_tenant: bool = False
    scopes: frozenset[Scope] = frozenset({"inference"})


current_principal: ContextVar[Principal | None] = ContextVar("current_principal", default=None)
"""Authenticated caller of the call that the current task serves, or None if authentication is off."""


def tenant_of_caller(claimed: str) -> str:
    """Return the tenant of a request, for which the client claims the tenant ``claimed``.

    If the caller may act for every tenant, or if authentication is off, the result is ``claimed``. Otherwise, the
    result is the caller's own tenant.
    """
    principal = current_principal.get()
    return claimed if principal is None or principal.any_tenant else principal.tenant


def caller_named(address: str) -> str:
    """Return the name of a caller for logs. The name is the caller's tenant, or the name of the caller's credentials,
    or the caller's address.
    """
    principal = current_principal.get()
    return address if principal is None else principal.tenant or principal.name
