"""What calls ask for and what they get, whatever protocol they come by, and who calls."""

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
    """An encoded file's bytes."""

    data: bytes


class Url(msgspec.Struct, frozen=True, tag=True):
    """Where the file is: ``data:``, ``https:`` or ``http:``.

    ``unwritten``: characters at the start of a ``data:`` URL that the protocol's code put there and the client did not write;
    errors count positions without them.
    """

    url: str
    unwritten: int = 0


class Frame(msgspec.Struct, frozen=True):
    """A picture of a video: an encoded file, and when it is seen in seconds."""

    data: bytes
    timestamp: float


class Frames(msgspec.Struct, frozen=True, tag=True):
    """A video as pictures."""

    frames: Sequence[Frame]


class Features(msgspec.Struct, frozen=True, tag=True):
    """Processed already: the model's own inputs, by the names of its processor in transformers; ``embeds`` alone is what the
    tower would give.
    """

    tensors: Mapping[str, TensorData]


Source = EncodedFile | Url | Frames | Features


class MediaPart(msgspec.Struct, frozen=True, kw_only=True):
    """An image, a sound or a video of a request.

    ``field``: its path in the request, for errors (``messages[0].content[1].image_url``). ``processor_kwargs``: more arguments of
    the model's processor.
    """

    modality: Modality
    source: Source
    field: str
    processor_kwargs: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Of what the client sent."""
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
"""What an output may turn out to be: text, or token ids. Drafts are looked up in it; it changes no token."""


class MixedPrompt(msgspec.Struct, frozen=True):
    """The parts of a prompt, in order."""

    parts: tuple[Part, ...]
    fields: tuple[str, ...]
    """What each part is called in the request, for errors."""

    @property
    def text(self) -> str:
        """Its texts, without what stands between them."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def media(self) -> list[MediaPart]:
        """Its images, sounds and videos, in order."""
        return [part for part in self.parts if isinstance(part, MediaPart)]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to continue: text, token ids, or parts of these, vectors and media."""

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
    """What the engine produced, the tokens of a stop string included."""
    accepted_draft_tokens: int = 0
    """Of these, those that engines have said were drafted. An attempt that ended without its engine's word says nothing: its
    engine was lost, or a stop string or the client ended it here."""
    rejected_draft_tokens: int = 0
    """Drafted tokens that the model did not choose, known as the accepted ones are."""
    reasoning_tokens: int | None = None
    """Of the completion tokens, those of reasoning, its tags included; None where reasoning is not looked for."""
    media_tokens: dict[Modality, int] = {}
    """Of the prompt tokens, those that media stand at; a modality that the prompt does not have is left out."""


class Finish(msgspec.Struct, frozen=True):
    """How an output ended."""

    reason: FinishReason
    stop_reason: int | str | None
    """The stop string or the stop token's id; None at the model's own end of sequence."""
    usage: Usage
    kv_source: KvSource | None = None
    """Who keeps its keys and values, where that was asked for."""
    kv_params: str = ""
    """What engines' own connector says of them, a JSON object; empty: nothing."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one of the n sequences, or all of it, as the output kind says."""

    index: int = 0
    """Which of the sequences it is of."""
    text: str
    token_ids: Sequence[int]
    logprobs: Logprobs | None = None
    """As many positions as ``token_ids``; None when they were not asked for, or there are no tokens."""
    prompt_logprobs: Logprobs | None = None
    """On the first piece of sequence 0; position i belongs to prompt token i + 1."""
    finish: Finish | None = None
    """On the last piece of its sequence."""


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message, as OpenAI's protocol has them."""

    type: str
    """``text`` or ``media``; another is refused."""
    text: str = ""
    media: MediaPart | None = None
    """Set where the type is ``media``."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool that an assistant asked for."""

    id: str = ""
    name: str
    arguments: str = ""
    """A JSON object as text; empty is an empty one."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | Sequence[ContentPart] | None = None
    """Texts of parts are joined with line breaks, unless the model's chat template reads parts."""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    """What the assistant thought before its content."""
    name: str = ""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments, None when it takes none."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to answer."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    """``auto``, ``none`` or ``required``."""
    named_tool: str = ""
    """The tool that must be called, whatever ``tool_choice`` says; empty: no such one."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str = ""
    """A chat template to use instead of the model's own; empty: the model's."""
    template_kwargs: dict[str, Any] = {}
    """More variables of the chat template, as ``enable_thinking``."""
    sampling: dict[str, Any] = {}
    """The sampling parameters that the client set, under the names of ``SamplingParams``."""
    prediction: Prediction | None = None
    context: RequestContext = RequestContext()

    @property
    def may_call(self) -> bool:
        """Whether the model may call tools: else it is not told of them, and no calls are looked for."""
        return bool(self.tools) and (bool(self.named_tool) or self.tool_choice != "none")


Prompt = str | Sequence[int]
"""Text, or token ids used as they are."""
PoolingPrompt = Prompt | MixedPrompt
"""The same, or text and media one after the other."""


Truncation = Literal["none", "end", "start"]
"""Where inputs of pooling requests that are too long are cut."""


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs to embed, classify or score, each on its own."""

    inputs: Sequence[PoolingPrompt]
    fields: Sequence[str]
    """What each input is called in the request, for errors, as ``inputs[0].text``."""
    params: PoolingParams
    seconds: Sequence[str] = ()
    """The second text of every pair, for a model that reads pairs."""
    truncate_prompt_tokens: int | None = None
    """Tokens that longer inputs are cut to; -1: as many as the model reads. None: as ``truncation`` says."""
    truncation: Truncation | None = None
    """Where longer inputs are cut, to as many tokens as the model reads unless ``truncate_prompt_tokens`` is set; ``none``: an
    input that is too long is refused. None: at the end if ``truncate_prompt_tokens`` is set, else as the server's
    ``limits.pooling_truncation`` says."""
    add_special_tokens: bool = True
    """False for a rendered conversation, whose template writes them."""
    context: RequestContext = RequestContext()


class PoolingResult(msgspec.Struct, frozen=True):
    """What the inputs of a PoolingRequest came to."""

    outputs: Sequence[EngineCoreOutput]
    """The engine's output for every input, in order."""
    prompt_tokens: int
    """Of all inputs."""
    held: Held | None = None
    """Counts the bytes of the outputs for as long as this is there; None where nobody counts them."""
    media_tokens: dict[Modality, int] = {}
    """Of the prompt tokens, those that media stand at."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How well documents fit queries: the only one, or each its own."""

    queries: Sequence[Prompt]
    """One, or as many as ``documents``."""
    query_fields: Sequence[str]
    """What each is called in the request, for errors, as ``query.text``."""
    documents: Sequence[Prompt]
    document_fields: Sequence[str]
    use_activation: bool = True
    """False: the model's bare scores. Only for models that read pairs."""
    truncate_prompt_tokens: int | None = None
    """As of a PoolingRequest: of every pair where the model reads pairs, else of every text."""
    truncation: Truncation | None = None
    context: RequestContext = RequestContext()


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a ScoreRequest came to: a score for each document."""

    request_id: str
    scores: Sequence[float]
    prompt_tokens: int
    """Of everything that was read."""


Scope: TypeAlias = Literal["inference", "admin"]
"""What a caller may use: what the public APIs serve to everyone, or what is the operators'."""


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A caller whose credentials were right. ``name`` is for logs; ``any_tenant``: it may speak for every tenant, as gateways
    do, else its requests are ``tenant``'s.
    """

    name: str
    tenant: str = ""
    any_tenant: bool = False
    scopes: frozenset[Scope] = frozenset({"inference"})


current_principal: ContextVar[Principal | None] = ContextVar("current_principal", default=None)
"""Who makes the call that this task serves; None where nobody is asked."""


def tenant_of_caller(claimed: str) -> str:
    """The tenant whose request this is: the caller's own, whatever it claims, unless it may speak for others."""
    principal = current_principal.get()
    return claimed if principal is None or principal.any_tenant else principal.tenant


def caller_named(address: str) -> str:
    """Whose call this is, for logs: the caller's tenant or the name of its credentials, else the address that it comes from."""
    principal = current_principal.get()
    return address if principal is None else principal.tenant or principal.name
