"""Validation of requests before they are queued. Pure checks, safe on any thread."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_common.types.request import MAX_TENANT_WEIGHT, MIN_TENANT_WEIGHT, EngineCoreRequest, RequestContext
from penstock_common.types.sampling import Bounds, SamplingParams, check_values, refuse_value
from penstock_enginecore.core.embeds_validation import check_prompt_embeds
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.pooling_validation import refuse_generation, validate_pooling
from penstock_enginecore.kv_transfer.core.validation import check_kv_transfer
from penstock_enginecore.media.core.validation import check_media

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_MAX_LISTED = 1024
"""Maximum number of entries in logit_bias, and maximum number of token sequences in bad_word_token_ids."""
_MAX_BAD_WORD_TOKENS = 1024


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The loaded model, and the limits that requests must not exceed."""

    model: ModelInfo
    max_model_len: int
    """Maximum length of a sequence that the engine serves, in tokens."""
    max_logprobs: int = 20
    """Maximum number of most likely tokens per position whose log-probabilities a request may ask for. -1 means no
    limit.
    """
    max_media: Mapping[str, int] = {}
    """Maximum number of media items per prompt, by modality. Modalities without an entry are not limited."""


def validate_request(request: EngineCoreRequest, limits: RequestLimits) -> None:
    """Raise InvalidArgument, with the name of the field, if the engine cannot serve ``request``.

    ``GrammarIntake.check`` checks output constraints.
    """
    if not request.request_id:
        raise InvalidArgument("request_id is empty", field="request_id")
    if request.pooling_params is not None:
        validate_pooling(request, limits.model.pooling, limits.max_model_len)
    elif limits.model.pooling is not None:
        refuse_generation(limits.model.pooling)
    _check_prompt(request, limits)
    _check_token_ids("prior_output_token_ids", request.prior_output_token_ids, limits.model.vocab_size)
    if request.pooling_params is None:
        check_sampling(request.sampling_params, limits)
    if request.prompt_embeds is not None:
        check_prompt_embeds(request, request.prompt_embeds, limits.model.hidden_size, limits.model.dtype)
    check_media(request, limits.model, limits.max_media)
    if request.attempt < 0:
        raise InvalidArgument(f"attempt is {request.attempt}; it must be at least 0", field="attempt")
    _check_reasoning(request, limits.model.vocab_size)
    _check_reasoning_budget(request)
    _check_prediction(request, limits)
    check_kv_transfer(request)
    _check_context(request.context)


def _check_context(context: RequestContext) -> None:
    if context.deadline is not None and not math.isfinite(context.deadline):
        raise InvalidArgument(f"deadline is {context.deadline}; it must be finite", field="deadline")
    if not _INT32_MIN <= context.priority <= _INT32_MAX:
        raise InvalidArgument(
            f"priority is {context.priority}; it must be at least {_INT32_MIN} and at most {_INT32_MAX}",
            field="priority",
        )
    if not MIN_TENANT_WEIGHT <= context.tenant_weight <= MAX_TENANT_WEIGHT:
        raise InvalidArgument(
            f"tenant_weight is {context.tenant_weight}; it must be at least {MIN_TENANT_WEIGHT:g} and at most "
            f"{MAX_TENANT_WEIGHT:g}",
            field="tenant_weight",
        )
    if context.data_parallel_rank not in (None, 0):
        raise InvalidArgument(
            f"data_parallel_rank is {context.data_parallel_rank}; this engine has only rank 0",
            field="data_parallel_rank",
        )


def _check_prompt(request: EngineCoreRequest, limits: RequestLimits) -> None:
    length, longest = len(request.prompt_token_ids), limits.max_model_len - 1
    if length == 0:
        raise InvalidArgument("prompt_token_ids is empty; it must have at least one token", field="prompt_token_ids")
    if length > longest and request.pooling_params is None:
        raise InvalidArgument(
            f"prompt_token_ids has {length} tokens; at most {longest} leave room for one output token "
            f"within max_model_len {limits.max_model_len}",
            field="prompt_token_ids",
        )
    _check_token_ids("prompt_token_ids", request.prompt_token_ids, limits.model.vocab_size)


def _check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        return
    worst = low if (low := min(token_ids)) < 0 else max(token_ids)
    if not 0 <= worst < vocab_size:
        raise InvalidArgument(
            f"{field}[{list(token_ids).index(worst)}] is {worst}; token ids go from 0 to {vocab_size - 1}", field=field
        )


def _check_reasoning(request: EngineCoreRequest, vocab_size: int) -> None:
    if (reasoning := request.reasoning_parser_kwargs) is None:
        return
    for name in ("begin_token_id", "end_token_id"):
        if not 0 <= (token_id := getattr(reasoning, name)) < vocab_size:
            field = f"reasoning_parser_kwargs.{name}"
            raise InvalidArgument(f"{field} is {token_id}; token ids go from 0 to {vocab_size - 1}", field=field)


def _check_reasoning_budget(request: EngineCoreRequest) -> None:
    name, budget = "thinking_token_budget", request.sampling_params.thinking_token_budget
    if budget is None:
        return
    if request.reasoning_parser_kwargs is None:
        raise InvalidArgument(
            f"sampling_params.{name} is {budget}, but reasoning_parser_kwargs, which has the tokens around the "
            "reasoning, is not set; set both or neither",
            field=_path(name),
        )


def _check_prediction(request: EngineCoreRequest, limits: RequestLimits) -> None:
    token_ids, field = request.prediction_token_ids, "prediction_token_ids"
    if not token_ids:
        return
    if request.pooling_params is not None:
        raise InvalidArgument(
            f"{field} is set together with pooling_params; a pooling request has no output", field=field
        )
    if len(token_ids) > limits.max_model_len:
        raise InvalidArgument(
            f"{field} has {len(token_ids)} tokens; the limit is max_model_len, {limits.max_model_len}", field=field
        )
    _check_token_ids(field, token_ids, limits.model.vocab_size)


def check_sampling(params: SamplingParams, limits: RequestLimits) -> None:
    """Raise InvalidArgument if an engine with these limits does not support ``params``."""
    if params.n != 1:
        raise InvalidArgument(
            f"sampling_params.n is {params.n}; it must be 1, because an engine generates one sequence per request",
            field=_path("n"),
        )
    check_values(params)
    if params.seed is None and not params.greedy:
        raise InvalidArgument(
            f"sampling_params.seed is unset; engines need a seed at temperature {params.temperature}",
            field=_path("seed"),
        )
    _check_rules(params, limits.model.vocab_size)
    if not params.logprob_token_ids:
        _check_logprobs("logprobs", params.logprobs, limits)
    _check_logprobs("prompt_logprobs", params.prompt_logprobs, limits)


def _check_rules(params: SamplingParams, vocab_size: int) -> None:
    _check_token_ids(_path("stop_token_ids"), params.stop_token_ids, vocab_size)
    _check_count("logit_bias", len(params.logit_bias), "entries")
    _check_token_ids(_path("logit_bias"), list(params.logit_bias), vocab_size)
    _check_token_ids(_path("allowed_token_ids"), params.allowed_token_ids, vocab_size)
    _check_token_ids(_path("logprob_token_ids"), params.logprob_token_ids, vocab_size)
    _check_bad_words(params, vocab_size)


def _check_bad_words(params: SamplingParams, vocab_size: int) -> None:
    name, words = "bad_word_token_ids", params.bad_word_token_ids
    if params.bad_words and not words:
        raise InvalidArgument(
            f"sampling_params.bad_words has {len(params.bad_words)} words, but {name} is empty; engines need the "
            "token ids of these words",
            field=_path("bad_words"),
        )
    _check_count(name, len(words), "sequences")
    for number, word in enumerate(words):
        if not word:
            raise InvalidArgument(
                f"sampling_params.{name}[{number}] is empty; it must have at least one token", field=_path(name)
            )
        if len(word) > _MAX_BAD_WORD_TOKENS:
            raise InvalidArgument(
                f"sampling_params.{name}[{number}] has {len(word)} tokens; the limit is {_MAX_BAD_WORD_TOKENS}",
                field=_path(name),
            )
        _check_token_ids(_path(name), word, vocab_size)
    banned = {word[0] for word in words if len(word) == 1}
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        raise InvalidArgument(
            f"sampling_params.allowed_token_ids has only tokens that {name} bans; at least one must remain",
            field=_path("allowed_token_ids"),
        )


def _check_logprobs(name: str, value: int | None, limits: RequestLimits) -> None:
    if value is None:
        return
    high = limits.model.vocab_size if limits.max_logprobs < 0 else limits.max_logprobs
    if value == -1 and high < limits.model.vocab_size:
        raise InvalidArgument(
            f"sampling_params.{name} is -1, which requests all {limits.model.vocab_size} tokens of the vocabulary; "
            f"the limit of this engine is {high}",
            field=_path(name),
        )
    if value != -1 and not (bounds := Bounds(0, high)).allow(value):
        refuse_value(name, value, bounds)


def _check_count(name: str, count: int, what: str) -> None:
    if count > _MAX_LISTED:
        raise InvalidArgument(
            f"sampling_params.{name} has {count} {what}; the limit is {_MAX_LISTED}", field=_path(name)
        )


def _path(name: str) -> str:
    return f"sampling_params.{name}"
