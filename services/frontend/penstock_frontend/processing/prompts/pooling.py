"""Conversion of pooling requests to engine requests, with one engine request per input."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock_common.config.settings import Reread
from penstock_common.errors import WRONG_MODEL_KIND, ConfigError, InvalidArgument
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.request import EngineCoreRequest, PoolingParams, PoolingTask, RequestContext
from penstock_frontend.call_types import MediaPart, MixedPrompt, PoolingRequest, Prompt
from penstock_frontend.config import LimitsConfig, ModelConfig
from penstock_frontend.interfaces import ModelLimits
from penstock_frontend.processing.prompts.input import (
    InputProcessor,
    check_size,
    check_token_ids,
    longest_text,
    warn_of_double_bos,
)
from penstock_frontend.processing.prompts.late_interaction import LateInteraction
from penstock_frontend.processing.prompts.mixed_prompt import media_tokens, no_media_with
from penstock_frontend.processing.prompts.named_prompts import NamedPrompts, check_texts, with_prompt
from penstock_frontend.processing.prompts.tokenizer import Tokenizer, cut, read_json, resolve
from penstock_frontend.processing.prompts.truncation import Cut

AS_MANY_AS_FIT = -1
"""Value of ``truncate_prompt_tokens`` that truncates inputs to the maximum length of the model."""
POOLING_WORDS = tuple(task.name.lower() for task in PoolingTask)
"""Names of the pooling tasks. An engine has the names of the tasks that it serves as capabilities."""


class _Tokenized(NamedTuple):
    """An input of a pooling request, after tokenization."""

    ids: list[int]
    second_text_start: int | None = None
    features: Sequence[MultiModalFeature] = ()
    unattended_start: int | None = None


class PoolingInputs:
    """Checks and tokenizes the inputs of pooling requests. Every error names the input, the value and the limit."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        inputs: InputProcessor,
        limits: Reread[LimitsConfig],
        prompts: NamedPrompts,
        late_interaction: LateInteraction | None = None,
    ) -> None:
        """Create the component. ``late_interaction`` has the settings of a late-interaction model, or None."""
        self.prompts = prompts
        self.late_interaction = late_interaction
        self._tokenizer = tokenizer
        self._inputs = inputs
        self._limits = limits
        self._serial = itertools.count(1)

    def check_count(self, count: int, *, field: str) -> None:
        """Raise InvalidArgument for a call that has no inputs, or too many inputs."""
        if count == 0:
            raise InvalidArgument(f"{field} is empty: there is nothing to compute", field=field)
        if count > (limit := self._limits.now.max_pooling_inputs):
            raise InvalidArgument(
                f"{field} has {count} entries; limits.max_pooling_inputs is {limit}",
                field=field,
            )

    def with_truncation(self, request: PoolingRequest) -> PoolingRequest:
        """Return the request with the final values of ``truncate_prompt_tokens`` and ``truncation``.

        In the result, ``truncate_prompt_tokens`` is None if inputs are not truncated. Otherwise ``truncation`` is the
        side at which tokens are removed.
        """
        where, tokens = request.truncation, request.truncate_prompt_tokens
        if where is None and tokens is not None:
            where = self._tokenizer.truncation_side
        elif where is None:
            # Media cannot be truncated, so the server's setting for truncation does not apply to calls with media.
            mixed = any(isinstance(each, MixedPrompt) for each in request.inputs)
            where = "none" if mixed else self._limits.now.pooling_truncation
        if where == "none":
            return msgspec.structs.replace(request, truncate_prompt_tokens=None, truncation=where)
        tokens = AS_MANY_AS_FIT if tokens is None else tokens
        return msgspec.structs.replace(request, truncate_prompt_tokens=tokens, truncation=where)

    async def shortened(self, texts: Sequence[Prompt], fields: Sequence[str], longest: int) -> list[Prompt]:
        """Return texts or token ids, each truncated at its end to ``longest`` tokens. ``fields`` are their paths. Raises
        InvalidArgument for a text that exceeds the limit on the prompt length.
        """
        for text, field in zip(texts, fields, strict=True):
            self._inputs.check_length(text, field=field)
        shortened = iter(await self._tokenizer.shortened([text for text in texts if isinstance(text, str)], longest))
        return [next(shortened) if isinstance(text, str) else text[:longest] for text in texts]

    async def process(
        self, request: PoolingRequest, request_id: str, limits: ModelLimits | None = None
    ) -> list[EngineCoreRequest]:
        """Convert a pooling request, as far as possible without an engine. Return one engine request for each input.

        If the engines' ``limits`` are known, texts that are much too long are refused before they are tokenized.
        """
        context = self._inputs.checked_context(request.context, request_id)
        late = self.late_interaction if request.num_queries is not None else None
        request = self._with_prompt(request)
        if limits is not None and request.truncate_prompt_tokens is not None:
            request = _shortened(request, longest_text(limits.max_model_len))
        for index in range(len(request.inputs)):
            self._check_input(request, index, limits)
        self._check_longest(request)
        if late is not None:
            tokenized = await self._sides(request, late, limits)
        else:
            tokenized = await (self._pairs(request) if request.seconds else self._singles(request, context, limits))
        return [
            EngineCoreRequest(
                # The serial number makes the id of the engine request unique, even if a client uses the same id again.
                request_id=f"{request_id}-p{next(self._serial):x}",
                prompt_token_ids=each.ids,
                pooling_params=request.params,
                second_text_start=each.second_text_start,
                unattended_start=each.unattended_start,
                mm_features=list(each.features),
                context=context,
            )
            for each in tokenized
        ]

    def check(
        self,
        request: PoolingRequest,
        core_requests: Sequence[EngineCoreRequest],
        limits: ModelLimits,
        capabilities: Sequence[str],
    ) -> None:
        """Check the pooling task, the lengths of the prompts and their token ids against the capabilities and limits of
        the engines.
        """
        check_task(request.params.task, capabilities)
        for core_request, field in zip(core_requests, request.fields, strict=True):
            prompt = core_request.prompt_token_ids
            check_token_ids(prompt, limits.vocab_size, field=field)
            if len(prompt) > limits.max_model_len:
                of_media = sum(media_tokens(core_request.mm_features).values())
                raise InvalidArgument(
                    f"{field} is {len(prompt)} tokens{f', {of_media} of them media' if of_media else ''}; "
                    f"max_model_len is {limits.max_model_len}",
                    field=field,
                    reason="PROMPT_TOO_LONG",
                )

    def _with_prompt(self, request: PoolingRequest) -> PoolingRequest:
        """Return the request with the model's prompt before each text to embed. Raises InvalidArgument if the client
        selects a prompt for token ids.
        """
        if request.params.task not in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SPARSE_EMBED):
            return request
        prompt = self.prompts.default_text if request.prompt is None else request.prompt
        if not prompt:
            return request
        if request.prompt is not None:
            check_texts(request.inputs, request.fields)
        return msgspec.structs.replace(request, inputs=[with_prompt(prompt, given) for given in request.inputs])

    def _check_input(self, request: PoolingRequest, index: int, limits: ModelLimits | None) -> None:
        prompt, field = request.inputs[index], request.fields[index]
        if isinstance(prompt, MixedPrompt):
            _check_mixed(request, prompt, field)
            return
        if not prompt:
            raise InvalidArgument(f"{field} is empty: there is nothing to compute", field=field)
        self._inputs.check_length(prompt, field=field)
        if limits is not None and isinstance(prompt, str):
            check_size(prompt, limits.max_model_len, field=field)
        if request.seconds:
            if not isinstance(prompt, str):
                raise InvalidArgument(f"{field} has token ids; a pair must consist of two texts", field=field)
            self._inputs.check_length(request.seconds[index], field=field)

    def _check_longest(self, request: PoolingRequest) -> None:
        longest, added = request.truncate_prompt_tokens, self._tokenizer.num_added(pair=bool(request.seconds))
        if longest is not None and longest <= added:
            raise InvalidArgument(
                f"truncate_prompt_tokens is {longest}; it must be above {added}, the number of special tokens around a text",
                field="truncate_prompt_tokens",
            )

    async def _singles(
        self, request: PoolingRequest, context: RequestContext, limits: ModelLimits | None
    ) -> list[_Tokenized]:
        """Tokenize inputs that are single texts or token ids.

        One thread tokenizes all texts in a single call, because one task per text would block the event loop.
        """
        texts = [prompt for prompt in request.inputs if isinstance(prompt, str)]
        cut = _cut_of(request)
        add = request.add_special_tokens
        encoded = await self._tokenizer.encode_all(texts, add_special_tokens=add, cut=cut) if texts else []
        of_texts = iter(encoded)
        tokenized = []
        for prompt, field in zip(request.inputs, request.fields, strict=True):
            if isinstance(prompt, MixedPrompt):
                joined = await self._inputs.join(prompt, context, limits, add_special_tokens=add)
                tokenized.append(_Tokenized(joined.token_ids, features=joined.features))
            else:
                ids = next(of_texts) if isinstance(prompt, str) else list(prompt)
                tokenized.append(_Tokenized(cut.of(ids) if cut is not None and not isinstance(prompt, str) else ids))
                if add and isinstance(prompt, str):
                    warn_of_double_bos(tokenized[-1].ids, self._tokenizer, field=field)
            if not tokenized[-1].ids:
                raise InvalidArgument(f"{field} has no tokens: there is nothing to compute", field=field)
        return tokenized

    async def _sides(
        self, request: PoolingRequest, late: LateInteraction, limits: ModelLimits | None
    ) -> list[_Tokenized]:
        """Tokenize queries and documents of a late-interaction model. Inputs that are token ids get no markers."""
        num_queries, given = request.num_queries or 0, _cut_of(request)
        longest = limits.max_model_len if limits is not None else late.expansion_length
        tokenized: dict[int, _Tokenized] = {}
        for is_query, indices in ((True, range(num_queries)), (False, range(num_queries, len(request.inputs)))):
            texts = {index: text for index in indices if isinstance(text := request.inputs[index], str)}
            encoded: list[list[int]] = []
            if texts:
                encoded = await self._tokenizer.encode_all(
                    [late.marked(text, is_query=is_query) for text in texts.values()],
                    add_special_tokens=request.add_special_tokens,
                    cut=None if given is None else late.cut(given, is_query=is_query),
                )
            for index, ids in zip(texts, encoded, strict=True):
                made = late.encoded(ids, is_query=is_query, max_len=longest)
                tokenized[index] = _Tokenized(made.ids, unattended_start=made.unattended_start)
        for index, prompt in enumerate(request.inputs):
            if isinstance(prompt, MixedPrompt):
                field = request.fields[index]
                raise InvalidArgument(f"{field} has media, but late-interaction models take only texts", field=field)
            if not isinstance(prompt, str):
                tokenized[index] = _Tokenized(list(prompt) if given is None else given.of(list(prompt)))
        return [tokenized[index] for index in range(len(request.inputs))]

    async def _pairs(self, request: PoolingRequest) -> list[_Tokenized]:
        """Tokenize inputs that are pairs of texts. Each result includes the position at which the second text of the
        pair begins.
        """
        pairs = zip(request.inputs, request.seconds, strict=True)
        encoded = await self._tokenizer.encode_pairs(
            [(str(first), second) for first, second in pairs], cut=_cut_of(request)
        )
        return [_Tokenized(pair.ids, pair.second_text_start) for pair in encoded]


def _cut_of(request: PoolingRequest) -> Cut | None:
    longest = request.truncate_prompt_tokens
    return None if longest is None else Cut(longest, "start" if request.truncation == "start" else "end")


def _check_mixed(request: PoolingRequest, prompt: MixedPrompt, field: str) -> None:
    """Raise InvalidArgument if a mixed input has a part that is neither text nor media.

    Raise Unimplemented for options that cannot be used with media.
    """
    if request.seconds:
        raise InvalidArgument(f"{field} has media; a pair must consist of two texts", field=field)
    for part, part_field in zip(prompt.parts, prompt.fields, strict=True):
        if not isinstance(part, (str, MediaPart)):
            raise InvalidArgument(
                f"{part_field} is neither text nor media; an input may have only text and media", field=part_field
            )
    if request.truncate_prompt_tokens is not None:
        raise no_media_with("truncate_prompt_tokens", field)


def _shortened(request: PoolingRequest, longest: int) -> PoolingRequest:
    """Cut texts to ``longest`` characters, because tokenizing text that will be truncated anyway is unnecessary work."""
    at_start = request.truncation == "start"
    return msgspec.structs.replace(
        request,
        inputs=[
            cut(prompt, longest, at_start=at_start) if isinstance(prompt, str) else prompt for prompt in request.inputs
        ],
        seconds=[cut(second, longest, at_start=at_start) for second in request.seconds],
    )


def answer_bytes(params: PoolingParams, requests: Sequence[EngineCoreRequest], embedding_size: int) -> int:
    """Return the number of bytes of the vectors in the results of engine requests. Each engine request has one float32
    vector, or one for each of its tokens.

    The number is 0 for tasks whose results are not vectors.
    """
    if params.task is PoolingTask.SPARSE_EMBED:  # at most a token id and a weight for each token
        return 8 * sum(len(request.prompt_token_ids) for request in requests)
    if params.task not in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED):
        return 0
    each_token = params.task is PoolingTask.TOKEN_EMBED
    rows = sum(len(request.prompt_token_ids) for request in requests) if each_token else len(requests)
    return 4 * rows * (params.dimensions or embedding_size)


def check_task(task: PoolingTask, capabilities: Sequence[str]) -> None:
    """Raise InvalidArgument if no engine serves the pooling task ``task``. The error names the tasks that engines
    serve.
    """
    word = task.name.lower()
    if word not in capabilities:
        raise _wrong_model(f"the model does not support {word}; it supports {served(capabilities)}")


def check_scores(capabilities: Sequence[str]) -> None:
    """Raise InvalidArgument if the engines can neither score pairs of texts nor compute embeddings.

    The error names the tasks that engines serve.
    """
    if not {"score", "embed", "token_embed"} & set(capabilities):
        raise _wrong_model(
            f"the model does not score: it supports neither score nor embed; it supports {served(capabilities)}"
        )


def check_pools(capabilities: Sequence[str]) -> None:
    """Raise InvalidArgument if no engine serves any pooling task. The error names the tasks that engines serve."""
    if not set(POOLING_WORDS) & set(capabilities):
        raise _wrong_model(f"the model supports no pooling task; it supports {served(capabilities)}")


def check_generates(capabilities: Sequence[str]) -> None:
    """Raise InvalidArgument if the engines serve only pooling tasks, and do not generate text. The error names the
    tasks that engines serve.
    """
    if "generate" not in capabilities and set(POOLING_WORDS) & set(capabilities):
        raise _wrong_model(f"the model does not generate; it supports {served(capabilities)}")


def _wrong_model(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="model", reason=WRONG_MODEL_KIND)


def served(capabilities: Sequence[str]) -> str:
    """Return the tasks that engines serve and clients can use, as text for an error message."""
    return ", ".join(word for word in capabilities if word in ("generate", *POOLING_WORDS)) or "nothing now"


def load_labels(config: ModelConfig) -> list[str]:
    """Return the names of the classes in config.json, in the order of the class indices.

    Return an empty list if there are none. Raises ConfigError if config.json or its names cannot be read.
    """
    file = resolve(config) / "config.json"
    try:
        named = {int(index): str(label) for index, label in read_json(file).get("id2label", {}).items()}
    except (ValueError, AttributeError) as e:
        raise ConfigError(f"{file} cannot be read: {e}") from None
    return [named.get(index, "") for index in range(max(named, default=-1) + 1)]
