"""Checks of sampling parameters and of list lengths, and the division of a request into its ``n`` sequences."""

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
"""Value of ``top_k`` that means in vLLM that ``top_k`` is off."""
_PATH = "sampling_params"


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default sampling parameters in a model's generation_config.json. Raises ConfigError if a value is out
    of range.

    Sampling filters apply only if ``do_sample`` is true in the file. The repetition penalty always applies.
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
    """Return the sampling parameters of a request, with all defaults filled in.

    Values in the request have priority, then the model's defaults, then Penstock's defaults.

    The seed is always set.

    Raises InvalidArgument, which names the field, the value and the limit.
    """
    params = SamplingParams(**_with_top_k({"seed": random.getrandbits(63), **defaults, **given}))
    check_values(params)
    if not (bounds := Bounds(1, limits.max_n)).allow(params.n):
        refuse_value("n", params.n, bounds)
    _check_counts(params, limits)
    _check_texts("stop", params.stop, "max_stop_string_chars", limits)
    _check_texts("bad_words", params.bad_words, "max_bad_word_chars", limits)
    if params.stop and not params.detokenize:
        raise InvalidArgument(
            f"{_PATH}.stop is set, but {_PATH}.detokenize is false; set detokenize to true",
            field=f"{_PATH}.stop",
        )
    if params.structured_output is not None:
        _check_structured_output(params.structured_output, limits)
    return params


def _with_top_k(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "top_k": 0} if values.get("top_k") == _TOP_K_OFF else values


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidArgument if ``params`` has a token id outside the vocabulary."""
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_ids("logprob_token_ids", params.logprob_token_ids, vocab_size)
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
    """Raise InvalidArgument if a list in ``params`` has too many entries. ``params`` is a ``SamplingParams`` or an API
    message.
    """
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


# The code below divides a request into its ``n`` sequences. Each sequence is a separate engine request.


def sequences(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Divide a request into one engine request for each sequence, in the order of the sequences' indices.

    Sequence i has the seed ``seed + i``, so its output equals the output of a single request with this seed. Prompt
    log-probabilities are the same for all sequences, so only the first sequence computes them. In each engine request,
    ``n`` is 1.

    The id of an engine request ends with a hyphen, the request's serial number, a dot, and the index. Two engine
    requests therefore never have the same id, even if clients choose equal ids.
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
    """Return the seed of a sequence. If the seed is above the largest possible value, continue from the smallest
    possible value.
    """
    return (seed - MIN_SEED) % (MAX_SEED - MIN_SEED + 1) + MIN_SEED


# The code below limits the lengths of lists in a request. The entries are counted before the lists are processed or
# copied.


def check_count(field: str, count: int, limits: LimitsConfig, name: str) -> None:
    """Raise InvalidArgument if the list ``field`` has more entries than the limit ``name`` allows."""
    limit: int = getattr(limits, name)
    if count > limit:
        raise InvalidArgument(f"{field} has {count} entries; limits.{name} is {limit}", field=field)


def check_conversation(messages: Sequence[Any], tools: Sequence[Any], limits: LimitsConfig) -> None:
    """Raise InvalidArgument if a conversation has too many messages or tools, or if a message has too many parts or
    tool calls.

    Messages may be ``ChatMessage`` objects or messages of the public API.
    """
    check_count("messages", len(messages), limits, "max_messages")
    check_count("tools", len(tools), limits, "max_tools")
    for index, message in enumerate(messages):
        check_count(f"messages[{index}].tool_calls", len(message.tool_calls), limits, "max_tool_calls")
        if isinstance(message.content, list):
            check_count(f"messages[{index}].content", len(message.content), limits, "max_content_parts")
