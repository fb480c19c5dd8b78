"""Checks the sampling parameters of a request, its list lengths, and the n choices of one prompt."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import (
    MAX_SEED,
    MIN_SEED,
    Bounds,
    SamplingParams,
    StructuredOutput,
    check_values,
    refuse_value,
)
from penstock_frontend.config import LimitsConfig

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")
_TOP_K_OFF = -1
"""How vLLM spells a ``top_k`` that is switched off."""
_PATH = "sampling_params"


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that a model's generation_config.json gives. Raises ConfigError when one of them is out of range.

    The sampling filters count only where the model asks to be sampled from (``do_sample``), the repetition penalty always.
    """
    defaults: dict[str, Any] = {}
    if generation_config.get("do_sample"):
        defaults = {k: generation_config[k] for k in SAMPLING_DEFAULTS if generation_config.get(k) is not None}
    if generation_config.get("repetition_penalty") is not None:
        defaults["repetition_penalty"] = generation_config["repetition_penalty"]
    if generation_config.get("max_new_tokens") is not None:
        defaults["max_tokens"] = generation_config["max_new_tokens"]
    defaults = _with_top_k(defaults)
    try:
        check_values(SamplingParams(**defaults))
    except (InvalidArgument, TypeError) as e:
        raise ConfigError(f"generation_config.json of the model: {e}") from None
    return defaults


def resolve(given: Mapping[str, Any], defaults: Mapping[str, Any], limits: LimitsConfig) -> SamplingParams:
    """The parameters of a request: what is given, else the model's defaults, else ours; the seed always concrete.

    Raises InvalidArgument naming the field, the value and the limit.
    """
    params = SamplingParams(**_with_top_k({"seed": random.getrandbits(63), **defaults, **given}))
    check_values(params)
    if not (bounds := Bounds(1, limits.max_n)).allow(params.n):
        refuse_value("n", params.n, bounds)
    _check_counts(params, limits)
    _check_texts("stop", params.stop, "max_stop_string_chars", limits)
    _check_texts("bad_words", params.bad_words, "max_bad_word_chars", limits)
    if params.stop and not params.detokenize:
        raise InvalidArgument(f"{_PATH}.stop needs {_PATH}.detokenize", field=f"{_PATH}.stop")
    if params.structured_output is not None:
        _check_structured_output(params.structured_output, limits)
    return params


def _with_top_k(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "top_k": 0} if values.get("top_k") == _TOP_K_OFF else values


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidArgument when one of the token ids in ``params`` does not exist."""
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_ids("bad_word_token_ids", [max(token_ids) for token_ids in params.bad_word_token_ids], vocab_size)
    for token_id in params.logit_bias:
        if token_id >= vocab_size:
            refuse_value(
                "logit_bias", f"given for token id {token_id}", f"for ids below the vocabulary size, {vocab_size}"
            )


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        refuse_value(f"{name}[{index}]", token_ids[index], f"below the vocabulary size, {vocab_size}")


def check_lists(params: Any, limits: LimitsConfig) -> None:
    """Raise InvalidArgument for a list with too many entries in parameters, the domain's or those of a message."""
    for name, what, limit in (
        ("stop", "strings", "max_stop_strings"),
        ("stop_token_ids", "ids", "max_stop_token_ids"),
        ("logit_bias", "ids", "max_logit_biases"),
        ("allowed_token_ids", "ids", "max_allowed_token_ids"),
        ("bad_words", "words", "max_bad_words"),
        ("bad_word_token_ids", "sequences", "max_bad_words"),
    ):
        count = len(getattr(params, name))
        if count > getattr(limits, limit):
            _refuse_size(f"{_PATH}.{name}", count, what, limit, limits)


def _check_counts(params: SamplingParams, limits: LimitsConfig) -> None:
    check_lists(params, limits)
    for index, token_ids in enumerate(params.bad_word_token_ids):
        field = f"{_PATH}.bad_word_token_ids[{index}]"
        if not token_ids:
            raise InvalidArgument(f"{field} is empty", field=field)
        if len(token_ids) > limits.max_bad_word_chars:
            _refuse_size(field, len(token_ids), "ids", "max_bad_word_chars", limits)


def _check_texts(name: str, texts: Sequence[str], limit: str, limits: LimitsConfig) -> None:
    for index, text in enumerate(texts):
        field = f"{_PATH}.{name}[{index}]"
        if not text:
            raise InvalidArgument(f"{field} is empty", field=field)
        if len(text) > getattr(limits, limit):
            _refuse_size(field, len(text), "characters", limit, limits)


def _check_structured_output(structured_output: StructuredOutput, limits: LimitsConfig) -> None:
    field = f"{_PATH}.structured_output"
    try:
        name, value = structured_output.constraint
    except ValueError as e:
        raise InvalidArgument(f"{field}: {e}", field=field) from None
    field = f"{field}.{name}"
    texts: Sequence[str] = (value,) if isinstance(value, str) else structured_output.choice
    if any(not text for text in texts):
        raise InvalidArgument(f"{field} is empty" if value == "" else f"{field} has an empty option", field=field)
    size = sum(len(text.encode()) for text in texts)
    if size > limits.max_structured_output_bytes:
        _refuse_size(field, size, "bytes", "max_structured_output_bytes", limits)


def _refuse_size(field: str, size: int, what: str, limit: str, limits: LimitsConfig) -> None:
    raise InvalidArgument(f"{field} has {size} {what}; limits.{limit} is {getattr(limits, limit)}", field=field)


# One prompt, several sequences (``n``): each is a request of its own to the engine.


def sequences(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """The engine's requests for a request, in the order of their index; without ``n`` > 1 it is its only one.

    Sequence i has seed + i, so it is what the same request with that seed gives alone. The prompt's log-probabilities are
    the same for all: only the first computes them. The engine sees requests with ``n`` 1.

    Behind the last hyphen of an id there is the request's number, then a dot and the index: ids that clients chose cannot
    make two of them the same.
    """
    params = request.sampling_params
    if params.n == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}.{index}",
            sampling_params=msgspec.structs.replace(
                params,
                n=1,
                seed=None if params.seed is None else _wrapped(params.seed + index),
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            ),
        )
        for index in range(params.n)
    ]


def _wrapped(seed: int) -> int:
    """Behind the largest seed comes the smallest."""
    return (seed - MIN_SEED) % (MAX_SEED - MIN_SEED + 1) + MIN_SEED


# How many entries the lists of a request may have. Lists are counted before they are looked at, or copied.


def check_count(field: str, count: int, limits: LimitsConfig, name: str) -> None:
    """Raise InvalidArgument for more entries in ``field`` than the limit ``name`` says."""
    limit: int = getattr(limits, name)
    if count > limit:
        raise InvalidArgument(f"{field} has {count} entries; limits.{name} is {limit}", field=field)


def check_conversation(messages: Sequence[Any], tools: Sequence[Any], limits: LimitsConfig) -> None:
    """Raise InvalidArgument for too many messages or tools, and for a message with too many parts or tool calls.

    The messages are the domain's, or those of the public API.
    """
    check_count("messages", len(messages), limits, "max_messages")
    check_count("tools", len(tools), limits, "max_tools")
    for index, message in enumerate(messages):
        check_count(f"messages[{index}].tool_calls", len(message.tool_calls), limits, "max_tool_calls")
        if isinstance(message.content, list):
            check_count(f"messages[{index}].content", len(message.content), limits, "max_content_parts")
