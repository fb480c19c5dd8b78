"""Conversion of generation requests to engine requests. The conversion applies defaults, tokenizes prompts, and checks
values.
"""

import itertools
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.config.settings import Reread
from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest, RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.call_types import GenerateRequest, MediaPart, MixedPrompt, Prediction
from penstock_frontend.call_warnings import WarningKind, warn
from penstock_frontend.config import FairnessConfig, LimitsConfig, LoraConfig
from penstock_frontend.dispatch.adapters import Adapters
from penstock_frontend.interfaces import ModelLimits
from penstock_frontend.processing.media.families.base import MediaPreparer
from penstock_frontend.processing.parsers.reasoning_tags import Reasoning
from penstock_frontend.processing.prompts import sampling_params
from penstock_frontend.processing.prompts.mixed_prompt import (
    JoinedPrompt,
    MediaInputs,
    PlacedMedia,
    check_beside_media,
    check_engines,
    check_media,
    join_parts,
)
from penstock_frontend.processing.prompts.tokenizer import Tokenizer

# The function below finds prompts that already begin with the BOS token, although the tokenizer adds this token too.


def warn_of_double_bos(token_ids: Sequence[int], tokenizer: Tokenizer, *, field: str) -> None:
    """Warn the client if the tokenized prompt begins with two equal special tokens.

    ``field`` is the name of the prompt's field in the warning.
    """
    first = tokenizer.leading_token
    if first is not None and len(token_ids) > 1 and token_ids[0] == token_ids[1] == first:
        name = quoted(tokenizer.text_of(first))
        warn(
            WarningKind.DOUBLE_BOS,
            field,
            f"begins with {name}, and the tokenizer adds another one: leave it out, or set add_special_tokens to false",
        )


MAX_CHARS_PER_TOKEN = 64
"""Assumed maximum number of characters of one token. A text with more characters than this number times the token limit
is refused before it is tokenized.
"""


class InputProcessor:
    """Checks and tokenizes generation requests. Every error names the field, the value and the limit."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        generation_config: Mapping[str, Any],
        *,
        model_name: str,
        limits: Reread[LimitsConfig],
        fairness: Reread[FairnessConfig],
        reasoning: Reasoning | None = None,
        adapters: Adapters | None = None,
        media: MediaPreparer | None = None,
        no_media: str = "",
    ) -> None:
        """Create the processor for a model.

        ``reasoning`` is the model's reasoning format. Output constraints apply only to the output after the reasoning.
        ``adapters`` are the LoRA adapters that requests may name, or None. ``media`` is None if only text is accepted.
        If ``media`` is set, the tokenizer treats the model's media tokens in texts as plain text from now on.
        ``no_media`` is the reason why this server accepts only text for a multimodal model. Raises ConfigError if the
        model's default sampling parameters are out of range, or if the tokenizer cannot treat the media tokens as plain
        text.
        """
        self._tokenizer = tokenizer
        self.defaults: Mapping[str, Any] = sampling_params.model_defaults(generation_config)
        self._model_name = model_name
        self._adapters = adapters or Adapters(LoraConfig(), model=model_name, frontend_id="")
        self._limits = limits
        self.reasoning = reasoning
        self._fairness = fairness
        self._serial = itertools.count(1)
        self.media: MediaInputs | None = None
        self.no_media = no_media
        if media is not None:
            tokenizer.hide(media.family.media_tokens)
            for modality in media.family.modalities:
                tokenizer.stand_in(media.family.placeholder(modality))
            self.media = MediaInputs(tokenizer, media)

    def check_model(self, name: str, lora: str = "", *, field: str = "model") -> str:
        """Return the name of the LoRA adapter that a request selects with ``name`` or ``lora``.

        If the request selects no adapter, return the name of the served model.

        Raises NotFound for unknown names, and the errors of ``Adapters.asked_for``.
        """
        return self._adapters.asked_for(name, lora, field=field) or self._model_name

    def request_id(self, given: str) -> str:
        """Return the id of a request for its client. The id is the one that the client gave, or a random id."""
        size = len(given.encode())
        if size > self._limits.now.max_request_id_bytes:
            raise InvalidArgument(
                f"request_id has {size} bytes; limits.max_request_id_bytes is {self._limits.now.max_request_id_bytes}",
                field="request_id",
            )
        return given or uuid.uuid4().hex

    def check_tenant(self, tenant: str) -> None:
        """Raise InvalidArgument if the name of a tenant is too long."""
        size = len(tenant.encode())
        if size > self._limits.now.max_tenant_bytes:
            raise InvalidArgument(
                f"routing.tenant has {size} bytes; limits.max_tenant_bytes is {self._limits.now.max_tenant_bytes}",
                field="routing.tenant",
            )

    def checked_context(self, context: RequestContext, request_id: str) -> RequestContext:
        """Return the request context for engines. The context has the client's request id, the arrival time and the
        weight of the tenant.

        Raises NotFound if the request names another model, and InvalidArgument for values that are too large.
        """
        self.check_model(context.model, context.lora)
        self.check_tenant(context.tenant)
        self._check_trace_context(context.trace_context)
        salt_size = len(context.cache_salt.encode())
        if salt_size > self._limits.now.max_cache_salt_bytes:
            raise InvalidArgument(
                f"cache_salt has {salt_size} bytes; limits.max_cache_salt_bytes is {self._limits.now.max_cache_salt_bytes}",
                field="cache_salt",
            )
        return msgspec.structs.replace(
            context,
            external_request_id=request_id,
            arrival_time=time.time(),
            tenant_weight=self._fairness.now.weight_of(context.tenant),
        )

    def _check_trace_context(self, trace_context: Mapping[str, str]) -> None:
        size = sum(len(name.encode()) + len(value.encode()) for name, value in trace_context.items())
        if size > self._limits.now.max_trace_context_bytes:
            raise InvalidArgument(
                f"routing.trace_context has {size} bytes; limits.max_trace_context_bytes is "
                f"{self._limits.now.max_trace_context_bytes}",
                field="routing.trace_context",
            )

    async def process(
        self, request: GenerateRequest, request_id: str, limits: ModelLimits | None = None
    ) -> EngineCoreRequest:
        """Convert a request to engine requests, as far as possible without an engine.

        ``request_id`` is the result of the method ``request_id``. If the engines' ``limits`` are known, a prompt that
        is much too long is refused before it is tokenized.
        """
        context = self.checked_context(request.context, request_id)
        params = sampling_params.resolve(request.sampling, self.defaults, self._limits.now)
        if params.bad_words:
            params = await self._with_bad_words(params)
        if limits is not None:
            _check_early(request.prompt, limits.max_model_len, truncated=params.truncate_prompt_tokens is not None)
            _check_parts(request.prompt, limits)
        if isinstance(request.prompt, MixedPrompt) and request.prompt.media:
            check_beside_media(request.prompt, params)
        prompt = await self._prompt(request, context, limits, truncated=params.truncate_prompt_tokens is not None)
        if params.truncate_prompt_tokens is not None:
            prompt = prompt.last(params.truncate_prompt_tokens)
        prediction = [] if request.prediction is None else await self._prediction(request.prediction, limits)
        reasoning = self._reasoning_for(params)
        return EngineCoreRequest(
            # The serial number makes the id of the engine request unique, even if a client uses the same id again.
            request_id=f"{request_id}-{next(self._serial):x}",
            prompt_token_ids=prompt.token_ids,
            prompt_embeds=prompt.embeds,
            mm_features=list(prompt.features),
            sampling_params=params,
            context=context,
            reasoning_ended=None if reasoning is None else reasoning.ended_by(_text_of(request.prompt), params),
            reasoning_parser_kwargs=reasoning.tokens if reasoning is not None else None,
            prediction_token_ids=prediction,
        )

    def _reasoning_for(self, params: SamplingParams) -> Reasoning | None:
        """Return the model's reasoning format if the sampling parameters need it. Otherwise return None.

        Raises InvalidArgument for a reasoning budget that engines cannot enforce.
        """
        budget = params.thinking_token_budget
        if budget is not None and self.reasoning is None:
            field = "sampling_params.thinking_token_budget"
            raise InvalidArgument(
                f"{field} is {budget}, but the server cannot limit this model's reasoning, because the model has no reasoning "
                "parser (model.reasoning_parser), or its reasoning tags have several tokens; remove the field and set max_tokens",
                field=field,
            )
        return self.reasoning if budget is not None or params.structured_output is not None else None

    def check(self, request: EngineCoreRequest, limits: ModelLimits) -> None:
        """Check the length of the prompt and its token ids against the limits of the engines."""
        prompt, params = request.prompt_token_ids, request.sampling_params
        if request.prompt_embeds is not None:
            check_hidden_size(request.prompt_embeds, limits.hidden_size, field="prompt")
        check_token_ids(prompt, limits.vocab_size, field="token_ids.ids")
        sampling_params.check_vocabulary(params, limits.vocab_size)
        check_prediction(request.prediction_token_ids, limits)
        if len(prompt) >= limits.max_model_len:
            raise _too_long(len(prompt), limits.max_model_len, request.mm_features)
        room_left = limits.max_model_len - len(prompt)
        if params.min_tokens > room_left:
            raise InvalidArgument(
                f"sampling_params.min_tokens is {params.min_tokens}; a prompt of {len(prompt)} tokens leaves room for "
                f"{room_left} output tokens",
                field="sampling_params.min_tokens",
            )

    def check_length(self, prompt: str | Sequence[int], *, field: str) -> None:
        """Raise InvalidArgument if a text or a list of token ids exceeds the limit on the prompt length."""
        if len(prompt) > self._limits.now.max_prompt_length:
            what = "characters" if isinstance(prompt, str) else "ids"
            raise InvalidArgument(
                f"{field} has {len(prompt)} {what}; limits.max_prompt_length is {self._limits.now.max_prompt_length}",
                field=field,
            )

    async def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Add the token ids of each bad word, once with and once without a leading space."""
        tokenized = await self._tokenizer.encode_all([form for word in params.bad_words for form in (word, f" {word}")])
        for index, token_ids in enumerate(tokenized):
            if not token_ids:
                field = f"sampling_params.bad_words[{index // 2}]"
                raise InvalidArgument(
                    f"{field} is {quoted(params.bad_words[index // 2])}, which has no tokens", field=field
                )
        unique = dict.fromkeys([*params.bad_word_token_ids, *(tuple(token_ids) for token_ids in tokenized)])
        return msgspec.structs.replace(params, bad_word_token_ids=tuple(unique))

    async def _prompt(
        self, request: GenerateRequest, context: RequestContext, limits: ModelLimits | None, *, truncated: bool
    ) -> JoinedPrompt:
        prompt = request.prompt
        if isinstance(prompt, MixedPrompt):
            add = request.add_special_tokens
            return await self.join(prompt, context, None if truncated else limits, add_special_tokens=add)
        field = "text" if isinstance(prompt, str) else "token_ids.ids"
        if not prompt:
            raise InvalidArgument(f"{field} is empty: there is no prompt", field=field)
        self.check_length(prompt, field=field)
        if isinstance(prompt, str):
            ids = (await self._tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)).ids
            if request.add_special_tokens:
                warn_of_double_bos(ids, self._tokenizer, field="prompt")
        else:
            ids = list(prompt)
        if not ids:
            raise InvalidArgument(f"{field} has no tokens: there is no prompt", field=field)
        return JoinedPrompt(ids, None)

    async def _prediction(self, prediction: Prediction, limits: ModelLimits | None) -> list[int]:
        """Return the token ids of a prediction, without special tokens around the prediction."""
        field = "prediction.text" if isinstance(prediction, str) else "prediction.token_ids.ids"
        if not prediction:
            raise InvalidArgument(f"{field} is empty: there is no prediction", field=field)
        self.check_length(prediction, field=field)
        if not isinstance(prediction, str):
            return list(prediction)
        if limits is not None:
            check_size(prediction, limits.max_model_len, field=field, reason="")
        return (await self._tokenizer.encode(prediction, add_special_tokens=False)).ids

    async def join(
        self,
        prompt: MixedPrompt,
        context: RequestContext,
        limits: ModelLimits | None,
        *,
        add_special_tokens: bool = True,
    ) -> JoinedPrompt:
        """Join the parts of a mixed prompt (texts, token ids, embeddings and media).

        ``limits`` are the engines' limits. ``limits`` is None if the limits are not known, or if the prompt will be
        truncated later. Raises InvalidArgument, and the errors of ``MediaPreparer.prepare``.
        """
        longest, what = self._limits.now.max_prompt_length, "limits.max_prompt_length"
        if limits is not None and limits.max_model_len < longest:
            longest, what = limits.max_model_len, "max_model_len"
        if not prompt.parts:
            raise InvalidArgument("mixed.parts is empty: there is no prompt", field="mixed.parts")
        for part, field in zip(prompt.parts, prompt.fields, strict=True):
            if not isinstance(part, (PromptEmbeds, MediaPart)):
                self.check_length(part, field=field)

        async def encode(text: str, is_first: bool) -> list[int]:
            return (await self._tokenizer.encode(text, add_special_tokens=add_special_tokens and is_first)).ids

        media: Sequence[PlacedMedia] = ()
        if prompt.media:
            check_media(prompt.media, None if self.media is None else self.media.preparer.family, self.no_media)
            if limits is not None:
                check_engines(prompt.media, limits)
            if self.media is not None:
                media = await self.media.placed(prompt, context)
        joined = await join_parts(prompt, encode, max_positions=longest, what=what, media=media)
        if add_special_tokens and isinstance(prompt.parts[0], str):
            warn_of_double_bos(joined.token_ids, self._tokenizer, field=prompt.fields[0])
        return joined


def longest_text(max_model_len: int) -> int:
    """Return the number of characters above which a text has too many tokens for the model, however it is tokenized."""
    return max_model_len * MAX_CHARS_PER_TOKEN


def check_size(text: str, max_model_len: int, *, field: str, reason: str = "PROMPT_TOO_LONG") -> None:
    """Raise InvalidArgument for a text that has too many tokens for the model, however it is tokenized.

    Such a text is never tokenized, because tokenizing it could take seconds.
    """
    longest = longest_text(max_model_len)
    if len(text) > longest:
        raise InvalidArgument(
            f"{field} has {len(text)} characters; for max_model_len {max_model_len}, at {MAX_CHARS_PER_TOKEN} characters "
            f"a token, the limit is {longest}",
            field=field,
            reason=reason,
        )


def check_prediction(token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Raise InvalidArgument if a prediction is longer than the longest possible output, or has a token id outside the
    vocabulary.
    """
    if len(token_ids) > limits.max_model_len:
        raise InvalidArgument(
            f"prediction is {len(token_ids)} tokens; max_model_len is {limits.max_model_len}", field="prediction"
        )
    check_token_ids(token_ids, limits.vocab_size, field="prediction.token_ids.ids")


def _check_early(prompt: str | Sequence[int] | MixedPrompt, max_model_len: int, *, truncated: bool) -> None:
    """Check the length of a prompt before the prompt is tokenized or copied."""
    if isinstance(prompt, str):
        check_size(prompt, max_model_len, field="text")
    elif not truncated and not isinstance(prompt, MixedPrompt) and len(prompt) > max_model_len:
        raise _too_long(len(prompt), max_model_len)


def _check_parts(prompt: str | Sequence[int] | MixedPrompt, limits: ModelLimits) -> None:
    """Check the parts of a mixed prompt before they are joined to one prompt."""
    if isinstance(prompt, MixedPrompt):
        for part, field in zip(prompt.parts, prompt.fields, strict=True):
            if isinstance(part, PromptEmbeds):
                check_hidden_size(part, limits.hidden_size, field=field)
            elif isinstance(part, str):
                check_size(part, limits.max_model_len, field=field)


def check_hidden_size(embeds: PromptEmbeds, hidden_size: int | None, *, field: str) -> None:
    """Raise InvalidArgument for embeddings of another size than the model's, and Unimplemented if the engines accept no
    embeddings.
    """
    if hidden_size == 0:
        raise Unimplemented(f"{field} has embeddings, but the engines accept no embeddings in prompts", field=field)
    if hidden_size is not None and embeds.hidden_size != hidden_size:
        raise InvalidArgument(
            f"{field} has embeddings of size {embeds.hidden_size}; the model's hidden size is {hidden_size}",
            field=field,
        )


def _text_of(prompt: str | Sequence[int] | MixedPrompt) -> str:
    """Return the prompt if it is a text, and an empty text otherwise."""
    if isinstance(prompt, MixedPrompt):
        return prompt.text if prompt.media else ""
    return prompt if isinstance(prompt, str) else ""


def _too_long(num_tokens: int, max_model_len: int, features: Sequence[MultiModalFeature] = ()) -> InvalidArgument:
    room = " and leaves no room for output" if num_tokens == max_model_len else ""
    of_media = f", {sum(feature.length for feature in features)} of them media" if features else ""
    return InvalidArgument(
        f"prompt is {num_tokens} tokens{of_media}; max_model_len is {max_model_len}{room}",
        field="prompt",
        reason="PROMPT_TOO_LONG",
    )


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, field: str) -> None:
    """Raise InvalidArgument if a token id is outside the vocabulary. The error names the first such id."""
    if token_ids and max(token_ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise InvalidArgument(
            f"{field}[{index}] is {token_ids[index]}; it must be below the vocabulary size, {vocab_size}", field=field
        )
