"""Conversion of the inputs of ``LLM`` methods to requests. Inputs can have several forms."""

import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_common.observability.logging import get_logger
from penstock_common.types.request import PoolingParams, RequestContext
from penstock_common.types.sampling import OutputKind, SamplingParams
from penstock_frontend.call_types import ChatMessage, ChatRequest, GenerateRequest, PoolingRequest, ScoreRequest, Tool
from penstock_frontend.in_process_media import UnplacedPrompt, contents_of, unplaced
from penstock_local.llm import parameters

T = TypeVar("T")

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Prompt as text or token ids, or as a mapping ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.

A prompt for generation may also have ``"prediction"``: the expected output as text or token ids. ``"multi_modal_data"``
has images, audio and videos, such as ``{"image": image}`` or ``{"image": [first, second]}``. The prompt then contains
the model's own placeholder tokens for the media. ``"mm_processor_kwargs"`` has extra arguments for the model's
processor.
"""
Message = Mapping[str, Any]
"""Message of a conversation: ``{"role": "user", "content": "..."}``.

``tool_calls`` and content parts are as in OpenAI's API. A media part may also be ``{"type": "image", "image": image}``,
in any form that ``multi_modal_data`` accepts.
"""
Sampling = SamplingParams | Mapping[str, Any] | None
"""Sampling parameters. SamplingParams sets all fields; with a mapping, the model's defaults apply to missing fields."""

_A_PROMPT = "a prompt is text or a list of token ids"
_A_CONVERSATION = 'a conversation is a list of messages, such as [{"role": "user", "content": "..."}]'
_ONE_EACH = "it must be SamplingParams, a mapping of its fields, or one for each input"


class Inputs(NamedTuple, Generic[T]):
    """Inputs of a call. Instead of an invalid input, the iterator yields its error. ``total`` is None if unknown."""

    each: Iterator[T | RequestFailed]
    total: int | None


class Predicted(NamedTuple):
    """A prompt for generation, with its optional prediction."""

    prompt: str | Sequence[int] | UnplacedPrompt
    prediction: str | Sequence[int] | None


def prompts_of(prompts: Prompt | Iterable[Prompt], *, name: str) -> Inputs[str | Sequence[int] | UnplacedPrompt]:
    """Convert one or several prompts. Raises InvalidArgument if the value is neither a prompt nor iterable."""
    return _prompts(prompts, name, _prompt)


def predicted_of(prompts: Prompt | Iterable[Prompt], *, name: str) -> Inputs[Predicted]:
    """Convert prompts that may have predictions."""
    return _prompts(prompts, name, _predicted)


def _prompts(prompts: Prompt | Iterable[Prompt], name: str, convert: Callable[[object, str], T]) -> Inputs[T]:
    if isinstance(prompts, str | Mapping):
        return Inputs(iter([convert(prompts, name)]), 1)
    several, first, total = _opened(prompts, name, _A_PROMPT)
    if _is_int(first):
        return Inputs(iter([convert(several, name)]), 1)
    return Inputs(_converted(several, lambda value, index: convert(value, f"{name}[{index}]")), total)


def conversations_of(messages: Iterable[Message] | Iterable[Iterable[Message]]) -> Inputs[list[ChatMessage]]:
    """Convert one or several conversations. Raises InvalidArgument if the value is neither a conversation nor iterable."""
    several, first, total = _opened(messages, "messages", _A_CONVERSATION)
    if isinstance(first, Mapping):
        return Inputs(_converted(iter([several]), _conversation), 1)
    return Inputs(_converted(several, _conversation), total)


def sampling_of(sampling: Sampling | Iterable[Sampling], total: int | None) -> Iterator[dict[str, Any] | RequestFailed]:
    """Yield the given sampling fields for each input. A single value is repeated endlessly.

    Raises InvalidArgument if a single value is invalid, or if the number of values is known and differs from ``total``.
    """
    if sampling is None or isinstance(sampling, SamplingParams | Mapping):
        return itertools.repeat(_fields(sampling, "sampling_params"))
    several, _, count = _opened(sampling, "sampling_params", _ONE_EACH)
    if count is not None and total is not None and count != total:
        raise InvalidArgument(
            f"sampling_params has {count} entries for {total} inputs; give one entry for all inputs, or one entry per input",
            field="sampling_params",
        )
    return _converted(several, lambda value, index: _fields(value, f"sampling_params[{index}]"))


def paired(
    inputs: Inputs[T], sampling: Sampling | Iterable[Sampling]
) -> Iterator[tuple[T, dict[str, Any]] | RequestFailed]:
    """Yield each input with its sampling parameters.

    Raises InvalidArgument if there are too few sampling parameters, and the errors of ``sampling_of``.
    """
    return map(
        _pair,
        itertools.count(),
        inputs.each,
        itertools.chain(sampling_of(sampling, inputs.total), itertools.repeat(None)),
    )


def _pair(index: int, value: Any, fields: dict[str, Any] | RequestFailed | None) -> Any:
    if fields is None:
        raise InvalidArgument(
            f"sampling_params has {index} entries, but there are more inputs; give one for all inputs, or one per input",
            field="sampling_params",
        )
    return next((each for each in (value, fields) if isinstance(each, RequestFailed)), (value, fields))


def _made(each: Iterator[Any], make: Callable[..., T]) -> Iterator[T | RequestFailed]:
    """Yield the request of each input. Yield errors among the inputs unchanged."""
    return (value if isinstance(value, RequestFailed) else make(value) for value in each)


def _converted(several: Iterator[Any], convert: Callable[[Any, int], T]) -> Iterator[T | RequestFailed]:
    for index, value in enumerate(several):
        try:
            yield convert(value, index)
        except RequestFailed as e:
            yield e


def _opened(several: object, name: str, wanted: str) -> tuple[Iterator[Any], object, int | None]:
    """Return an iterator, its first entry (None if empty), and its length (None if unknown)."""
    each = iter(_iterable(several, name, wanted))
    try:
        first = next(each)
    except StopIteration:
        return iter(()), None, 0
    return itertools.chain([first], each), first, len(several) if hasattr(several, "__len__") else None


def _prompt(prompt: object, name: str) -> str | Sequence[int] | UnplacedPrompt:
    return _prompt_of_mapping(prompt, name) if isinstance(prompt, Mapping) else _plain(prompt, name)


def _plain(prompt: object, name: str) -> str | Sequence[int]:
    if isinstance(prompt, str):
        return prompt
    ids = _listed(prompt, name, _A_PROMPT)
    for index, token in enumerate(ids):
        if not _is_int(token) or token < 0:
            raise InvalidArgument(f"{name}[{index}] is {token!r}; token ids are integers from 0 on", field=name)
    return ids


def _predicted(prompt: object, name: str) -> Predicted:
    if not isinstance(prompt, Mapping) or "prediction" not in prompt:
        return Predicted(_prompt(prompt, name), None)
    rest = {key: value for key, value in prompt.items() if key != "prediction"}
    prediction, field = prompt["prediction"], f"{name}.prediction"
    if isinstance(prediction, Mapping):
        raise InvalidArgument(f"{field} is a mapping; it must be text or a list of token ids", field=field)
    return Predicted(_prompt_of_mapping(rest, name), None if prediction is None else _plain(prediction, field))


def _prompt_of_mapping(prompt: Mapping[str, Any], name: str) -> str | Sequence[int] | UnplacedPrompt:
    """Convert a mapping with a prompt and optional media. Other keys are not supported and are refused."""
    if (data := prompt.get("multi_modal_data")) is not None:
        rest = {key: value for key, value in prompt.items() if key not in ("multi_modal_data", "mm_processor_kwargs")}
        return unplaced(_alone(rest, name), data, prompt.get("mm_processor_kwargs"), name)
    rest = {key: value for key, value in prompt.items() if key != "multi_modal_data"}
    return _alone(rest, name)


def _alone(prompt: Mapping[str, Any], name: str) -> str | Sequence[int]:
    forms = ("prompt", "prompt_token_ids")
    if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    if set(prompt) == {"prompt_token_ids"} and not isinstance(prompt["prompt_token_ids"], str | Mapping):
        return _plain(prompt["prompt_token_ids"], f"{name}.prompt_token_ids")
    keys = ", ".join(map(repr, prompt)) or "nothing"
    raise InvalidArgument(f"{name} is a mapping with {keys}; it must have only {' or '.join(forms)}", field=name)


def _listed(several: object, name: str, wanted: str) -> list[Any]:
    """Return the items of an iterable, such as a generator or a table column.

    Text, bytes and mappings are single values.
    """
    return list(_iterable(several, name, wanted))


def _iterable(several: object, name: str, wanted: str) -> Iterable[Any]:
    if not isinstance(several, Iterable) or isinstance(several, str | bytes | bytearray | Mapping):
        kind = "None" if several is None else f"of type {type(several).__name__}"
        raise InvalidArgument(f"{name} is {kind}; {wanted}", field=name)
    return several


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _conversation(messages: object, index: int) -> list[ChatMessage]:
    name = f"conversations[{index}]"
    return [
        _message(message, f"{name}.messages[{turn}]")
        for turn, message in enumerate(_listed(messages, name, _A_CONVERSATION))
    ]


def _message(message: object, name: str) -> ChatMessage:
    if isinstance(message, Mapping):
        # Programs send answers back with all fields, including null fields. OpenAI's clients call the reasoning
        # ``reasoning_content``.
        message = {key: value for key, value in message.items() if value is not None}
        if "reasoning_content" in message:
            message.setdefault("reasoning", message["reasoning_content"])
    if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list):
        message = {**message, "tool_calls": [_without_function(call) for call in message["tool_calls"]]}
    if isinstance(message, Mapping) and isinstance(message.get("content"), list):
        turn = name[name.rindex("messages[") :]
        message = {**message, "content": contents_of(message["content"], f"{turn}.content")}
    try:
        return msgspec.convert(message, ChatMessage)
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"{name}: {e}", field=name) from None


def _without_function(given: object) -> object:
    """Return a tool or tool call of OpenAI's API with the fields of ``function`` moved to the top level."""
    if not isinstance(given, Mapping) or not isinstance(given.get("function"), Mapping):
        return given
    flat = {**given, **given["function"]}
    del flat["function"]
    if flat.get("arguments", "") is None:
        del flat["arguments"]
    elif isinstance(flat.get("arguments"), Mapping):
        flat["arguments"] = msgspec.json.encode(flat["arguments"]).decode()
    return flat


def tools_of(tools: Iterable[Mapping[str, Any]] | None) -> list[Tool]:
    """Convert tools of OpenAI's API, or bare functions. Tools of other types are skipped with a log line.

    Raises InvalidArgument naming the tool.
    """
    listed = [] if tools is None else _listed(tools, "tools", "tools are a list of functions")
    found = []
    for index, tool in enumerate(listed):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind != "function":
            get_logger().warning(
                "served a request, but ignored or changed a field", kind="tool_left_out", field=f"tools[{index}]"
            )
            continue
        try:
            found.append(msgspec.convert(_without_function(tool), Tool))
        except msgspec.ValidationError as e:
            raise InvalidArgument(f"tools[{index}]: {e}", field=f"tools[{index}]") from None
    return found


def _fields(sampling: object, name: str) -> dict[str, Any]:
    """Return the given fields. Their types are checked, and lists are converted to tuples.

    Fields that are None keep their defaults.
    """
    given = _given(sampling, name)
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    plain = msgspec.to_builtins(given)
    if isinstance(plain.get("structured_output"), dict):
        plain["structured_output"] = _with_json_as_text(plain["structured_output"], name)
    try:
        checked = msgspec.convert(plain, SamplingParams)
    except msgspec.ValidationError as e:
        raise InvalidArgument(f"{name}: {e}", field=name) from None
    return {**{field: getattr(checked, field) for field in given}, "output_kind": OutputKind.FINAL}


def _with_json_as_text(constraint: dict[str, Any], name: str) -> dict[str, Any]:
    """Convert JSON in a constraint from a mapping to text. Raises InvalidArgument for an unknown field."""
    for field in constraint:
        if refusal := parameters.StructuredOutput.refusal(str(field)):
            raise InvalidArgument(f"{name}.structured_output: {refusal}", field=name)
    return {
        kind: json.dumps(value) if kind in ("json_schema", "structural_tag") and isinstance(value, dict) else value
        for kind, value in constraint.items()
    }


def _given(sampling: object, name: str) -> dict[str, Any]:
    if sampling is None:
        return {}
    if isinstance(sampling, SamplingParams):
        values: Mapping[str, Any] = {field: getattr(sampling, field) for field in sampling.__struct_fields__}
    elif not isinstance(sampling, Mapping):
        kind = type(sampling).__name__
        raise InvalidArgument(
            f"{name} is of type {kind}; it must be SamplingParams or a mapping of its fields", field=name
        )
    else:
        values = sampling
        for field in values:
            if refusal := parameters.SamplingParams.refusal(str(field)):
                raise InvalidArgument(f"{name}: {refusal}", field=name)
    return {field: value for field, value in values.items() if value is not None}


def context_of(lora: str = "", **others: Any) -> RequestContext:
    """Return the context of all requests of a call. ``others`` are fields of the context.

    Raises InvalidArgument if ``lora`` is not a name.
    """
    if not isinstance(lora, str):
        raise InvalidArgument(f"lora is {lora!r}; it must be an adapter's name, or empty", field="lora")
    return RequestContext(lora=lora, **others)


class Requests:
    """Factory of requests. If ``seed`` is set, a request without a seed gets a seed that is derived from ``seed`` and
    from the number of earlier requests.
    """

    def __init__(self, seed: int | None) -> None:
        self._seeds = None if seed is None else random.Random(seed)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Iterable[Sampling],
        context: RequestContext,
        *,
        name: str = "prompts",
    ) -> Inputs[GenerateRequest]:
        """Create generation requests.

        ``name`` is the name of the inputs in errors. Raises InvalidArgument for errors that affect all inputs.
        """
        inputs = predicted_of(prompts, name=name)

        def request(pair: tuple[Predicted, dict[str, Any]]) -> GenerateRequest:
            return GenerateRequest(**pair[0]._asdict(), sampling=self.seeded(pair[1]), context=context)

        return Inputs(_made(paired(inputs, sampling), request), inputs.total)

    def single(self, prompt: Prompt, sampling: Sampling, kind: OutputKind, context: RequestContext) -> GenerateRequest:
        """Create one generation request. Raises InvalidArgument if the prompt is empty or not valid."""
        request = next(self.generate(prompt, sampling, context, name="prompt").each, None)
        if request is None:
            raise InvalidArgument("prompt is empty", field="prompt")
        if isinstance(request, RequestFailed):
            raise request
        return msgspec.structs.replace(request, sampling={**request.sampling, "output_kind": kind})

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling: Sampling | Iterable[Sampling],
        like: ChatRequest,
    ) -> Inputs[ChatRequest]:
        """Create chat requests with the options of ``like``. Raises InvalidArgument for errors that affect all inputs."""
        inputs = conversations_of(messages)

        def request(pair: tuple[list[ChatMessage], dict[str, Any]]) -> ChatRequest:
            return msgspec.structs.replace(like, messages=pair[0], sampling=self.seeded(pair[1]))

        return Inputs(_made(paired(inputs, sampling), request), inputs.total)

    def pool(
        self,
        texts: Prompt | Iterable[Prompt],
        params: PoolingParams,
        *,
        truncate_prompt_tokens: int | None = None,
        lora: str = "",
        prompt: str | None = None,
    ) -> Inputs[PoolingRequest]:
        """Create requests of a pooling task. ``prompt`` is a field of PoolingRequest. Raises InvalidArgument for errors
        that affect all inputs.
        """
        inputs, context = prompts_of(texts, name="texts"), context_of(lora=lora)
        made = (
            text
            if isinstance(text, RequestFailed)
            else PoolingRequest(
                inputs=[text],
                fields=[f"texts[{index}]"],
                params=params,
                truncate_prompt_tokens=truncate_prompt_tokens,
                prompt=prompt,
                context=context,
            )
            for index, text in enumerate(inputs.each)
        )
        return Inputs(made, inputs.total)

    def score(
        self, queries: Prompt | Iterable[Prompt], documents: Prompt | Iterable[Prompt], **options: Any
    ) -> Inputs[ScoreRequest]:
        """Create scoring requests. Each document is paired with the only query, or with its own query.

        ``options`` are fields of ScoreRequest. Raises InvalidArgument if the number of queries is neither 1 nor the
        number of documents.
        """
        first, second = _texts(prompts_of(queries, name="queries")), _texts(prompts_of(documents, name="documents"))
        if first.total is None:
            listed = list(first.each)
            first = Inputs(iter(listed), len(listed))
        if first.total != 1 and second.total is not None and first.total != second.total:
            raise InvalidArgument(
                f"queries has {first.total} entries for {second.total} documents; give one for all, or one per document",
                field="queries",
            )
        return Inputs(_score_pairs(list(first.each), second.each, options), second.total)

    def seeded(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters, with a seed added if needed."""
        if self._seeds is None or "seed" in sampling:
            return dict(sampling)
        return {**sampling, "seed": self._seeds.getrandbits(63)}


def _texts(inputs: Inputs[Any]) -> Inputs[Any]:
    """Return the inputs. Each input with media is replaced by an error."""

    def checked(value: Any) -> Any:
        if not isinstance(value, UnplacedPrompt):
            return value
        field = f"{value.fields[0]}.multi_modal_data"
        return Unimplemented(f"{field} is set, but scores support only text; remove it", field=field)

    return Inputs(map(checked, inputs.each), inputs.total)


def _score_pairs(
    queries: list[Any], documents: Iterator[Any], options: dict[str, Any]
) -> Iterator[ScoreRequest | RequestFailed]:
    for index, document in enumerate(documents):
        of = 0 if len(queries) == 1 else index
        if of >= len(queries):
            raise InvalidArgument(
                f"queries has {len(queries)} entries, but there are more documents; give one for all, or one per document",
                field="queries",
            )
        wrong = next((each for each in (queries[of], document) if isinstance(each, RequestFailed)), None)
        yield wrong or ScoreRequest(
            queries=[queries[of]],
            query_fields=[f"queries[{of}]"],
            documents=[document],
            document_fields=[f"documents[{index}]"],
            **options,
        )
