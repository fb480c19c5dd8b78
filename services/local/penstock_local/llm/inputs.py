"""What callers of an ``LLM`` give, in several forms, and the requests made from it."""

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
"""Text, or token ids used as they are; or either as ``{"prompt": text}``, ``{"prompt_token_ids": ids}``. One that is to be
continued may have ``"prediction"`` beside it, text or token ids: what the output may turn out to be.
``"multi_modal_data"`` has images, sounds and videos, as ``{"image": image}`` or ``{"image": [first, second]}``, and the prompt
the model's own tokens where they are to stand; ``"mm_processor_kwargs"``: more arguments of the model's processor.
"""
Message = Mapping[str, Any]
"""A turn of a conversation: ``{"role": "user", "content": "..."}``, with ``tool_calls`` as OpenAI's protocol has them, and parts
of content with media; those also as ``{"type": "image", "image": image}``, in whatever form ``multi_modal_data`` takes.
"""
Sampling = SamplingParams | Mapping[str, Any] | None
"""How to choose tokens. SamplingParams says everything; a mapping some of its fields, and the rest is the model's own."""

_A_PROMPT = "a prompt is text or a list of token ids"
_A_CONVERSATION = 'a conversation is a list of messages, as [{"role": "user", "content": "..."}]'
_ONE_EACH = "it must be SamplingParams, a mapping of its fields, or one for each input"


class Inputs(NamedTuple, Generic[T]):
    """Inputs of a call, read one by one: what is wrong with one of them stands in its place. ``total`` None: nobody knows yet."""

    each: Iterator[T | RequestFailed]
    total: int | None


class Predicted(NamedTuple):
    """A prompt to continue, and what that may turn out to be."""

    prompt: str | Sequence[int] | UnplacedPrompt
    prediction: str | Sequence[int] | None


def prompts_of(prompts: Prompt | Iterable[Prompt], *, name: str) -> Inputs[str | Sequence[int] | UnplacedPrompt]:
    """Prompts, also a single one. Raises InvalidArgument for what is none and cannot be gone through."""
    return _prompts(prompts, name, _prompt)


def predicted_of(prompts: Prompt | Iterable[Prompt], *, name: str) -> Inputs[Predicted]:
    """The same of prompts that may have predictions."""
    return _prompts(prompts, name, _predicted)


def _prompts(prompts: Prompt | Iterable[Prompt], name: str, convert: Callable[[object, str], T]) -> Inputs[T]:
    if isinstance(prompts, str | Mapping):
        return Inputs(iter([convert(prompts, name)]), 1)
    several, first, total = _opened(prompts, name, _A_PROMPT)
    if _is_int(first):
        return Inputs(iter([convert(several, name)]), 1)
    return Inputs(_converted(several, lambda value, index: convert(value, f"{name}[{index}]")), total)


def conversations_of(messages: Iterable[Message] | Iterable[Iterable[Message]]) -> Inputs[list[ChatMessage]]:
    """Conversations, also a single one. Raises InvalidArgument for what is none and cannot be gone through."""
    several, first, total = _opened(messages, "messages", _A_CONVERSATION)
    if isinstance(first, Mapping):
        return Inputs(_converted(iter([several]), _conversation), 1)
    return Inputs(_converted(several, _conversation), total)


def sampling_of(sampling: Sampling | Iterable[Sampling], total: int | None) -> Iterator[dict[str, Any] | RequestFailed]:
    """The fields that are set, for each input: one for all is repeated without end. Raises InvalidArgument for one for all that
    is wrong, and where their number is known to be another than ``total``.
    """
    if sampling is None or isinstance(sampling, SamplingParams | Mapping):
        return itertools.repeat(_fields(sampling, "sampling_params"))
    several, _, count = _opened(sampling, "sampling_params", _ONE_EACH)
    if count is not None and total is not None and count != total:
        raise InvalidArgument(
            f"sampling_params has {count} entries for {total} inputs; give one for all, or one each",
            field="sampling_params",
        )
    return _converted(several, lambda value, index: _fields(value, f"sampling_params[{index}]"))


def paired(
    inputs: Inputs[T], sampling: Sampling | Iterable[Sampling]
) -> Iterator[tuple[T, dict[str, Any]] | RequestFailed]:
    """Each input with its sampling parameters. Raises InvalidArgument when there are fewer of these, or as ``sampling_of``
    does.
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
            f"sampling_params has {index} entries and there are more inputs; give one for all, or one each",
            field="sampling_params",
        )
    return next((each for each in (value, fields) if isinstance(each, RequestFailed)), (value, fields))


def _made(each: Iterator[Any], make: Callable[..., T]) -> Iterator[T | RequestFailed]:
    """A request of each; what was wrong stays."""
    return (value if isinstance(value, RequestFailed) else make(value) for value in each)


def _converted(several: Iterator[Any], convert: Callable[[Any, int], T]) -> Iterator[T | RequestFailed]:
    for index, value in enumerate(several):
        try:
            yield convert(value, index)
        except RequestFailed as e:
            yield e


def _opened(several: object, name: str, wanted: str) -> tuple[Iterator[Any], object, int | None]:
    """What can be gone through, its first entry (None without one) and how many there are, where it says so."""
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
    """The one thing in it, with its media. Other keys mean what is not done here, and are refused."""
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
    raise InvalidArgument(f"{name} is a mapping with {keys}; it must have {' or '.join(forms)} alone", field=name)


def _listed(several: object, name: str, wanted: str) -> list[Any]:
    """Whatever can be gone through as a list: a generator or a column of a table, too. Text, bytes and mappings are one thing."""
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
        # Answers that programs send back have every field, and what was thought under OpenAI's clients' name.
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
    """A tool, or a call of one, as OpenAI's protocol has it, with what stands in ``function`` beside its other fields."""
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
    """Tools as OpenAI's protocol has them, or only their functions. Tools of other types are left out, with a line in the log.
    Raises InvalidArgument naming the tool.
    """
    listed = [] if tools is None else _listed(tools, "tools", "tools are a list of functions")
    found = []
    for index, tool in enumerate(listed):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind != "function":
            get_logger().warning("request was changed to be served", kind="tool_left_out", field=f"tools[{index}]")
            continue
        try:
            found.append(msgspec.convert(_without_function(tool), Tool))
        except msgspec.ValidationError as e:
            raise InvalidArgument(f"tools[{index}]: {e}", field=f"tools[{index}]") from None
    return found


def _fields(sampling: object, name: str) -> dict[str, Any]:
    """Checked by type, tuples made of lists. What is None the model and the server's own defaults decide."""
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
    """A constraint whose JSON may be given as the mapping that it is. Raises InvalidArgument for an unknown field."""
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
    """What holds for a whole call. ``others``: fields of the context. Raises InvalidArgument for a ``lora`` that is no name."""
    if not isinstance(lora, str):
        raise InvalidArgument(f"lora is {lora!r}; it must be an adapter's name, or empty", field="lora")
    return RequestContext(lora=lora, **others)


class Requests:
    """Makes requests. ``seed``: those without a seed get one that follows from it and from how many came before."""

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
        """Prompts to continue. ``name``: what errors call them. Raises InvalidArgument for what is wrong with all of them."""
        inputs = predicted_of(prompts, name=name)

        def request(pair: tuple[Predicted, dict[str, Any]]) -> GenerateRequest:
            return GenerateRequest(**pair[0]._asdict(), sampling=self.seeded(pair[1]), context=context)

        return Inputs(_made(paired(inputs, sampling), request), inputs.total)

    def single(self, prompt: Prompt, sampling: Sampling, kind: OutputKind, context: RequestContext) -> GenerateRequest:
        """One prompt to continue. Raises InvalidArgument."""
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
        """Conversations to answer, in all else ``like`` this one. Raises InvalidArgument for what is wrong with all of them."""
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
    ) -> Inputs[PoolingRequest]:
        """Inputs of a pooling task. Raises InvalidArgument for what is wrong with all of them."""
        inputs, context = prompts_of(texts, name="texts"), context_of(lora=lora)
        made = (
            text
            if isinstance(text, RequestFailed)
            else PoolingRequest(
                inputs=[text],
                fields=[f"texts[{index}]"],
                params=params,
                truncate_prompt_tokens=truncate_prompt_tokens,
                context=context,
            )
            for index, text in enumerate(inputs.each)
        )
        return Inputs(made, inputs.total)

    def score(
        self, queries: Prompt | Iterable[Prompt], documents: Prompt | Iterable[Prompt], **options: Any
    ) -> Inputs[ScoreRequest]:
        """Pairs: each document with the only query, or with its own. Raises InvalidArgument where their numbers do not fit.
        ``options``: fields of a ScoreRequest.
        """
        first, second = _texts(prompts_of(queries, name="queries")), _texts(prompts_of(documents, name="documents"))
        if first.total is None:
            listed = list(first.each)
            first = Inputs(iter(listed), len(listed))
        if first.total != 1 and second.total is not None and first.total != second.total:
            raise InvalidArgument(
                f"queries has {first.total} entries for {second.total} documents; give one for all, or one each",
                field="queries",
            )
        return Inputs(_score_pairs(list(first.each), second.each, options), second.total)

    def seeded(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling parameters with a seed, where one is to be given."""
        if self._seeds is None or "seed" in sampling:
            return dict(sampling)
        return {**sampling, "seed": self._seeds.getrandbits(63)}


def _texts(inputs: Inputs[Any]) -> Inputs[Any]:
    """The same, with a refusal in the place of each that has media."""

    def checked(value: Any) -> Any:
        if not isinstance(value, UnplacedPrompt):
            return value
        field = f"{value.fields[0]}.multi_modal_data"
        return Unimplemented(f"{field} is set; scores are of texts", field=field)

    return Inputs(map(checked, inputs.each), inputs.total)


def _score_pairs(
    queries: list[Any], documents: Iterator[Any], options: dict[str, Any]
) -> Iterator[ScoreRequest | RequestFailed]:
    for index, document in enumerate(documents):
        of = 0 if len(queries) == 1 else index
        if of >= len(queries):
            raise InvalidArgument(
                f"queries has {len(queries)} entries and there are more documents; give one for all, or one each",
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
