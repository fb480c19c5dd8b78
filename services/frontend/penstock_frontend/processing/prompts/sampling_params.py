"""Sampling parameters of a request: the model's defaults, then ours, and the limits of each."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_common.types.sampling import (
    MAX_SEED,
    MAX_SPECULATIVE_TOKENS,
    MIN_SEED,
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
)
from penstock_frontend.config import LimitsConfig

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")
_RANGES: dict[str, tuple[float, float | None]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, None),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "max_tokens": (1, None),
    "logprobs": (-1, None),
    "prompt_logprobs": (-1, None),
    "stream_interval": (1, None),
    "truncate_prompt_tokens": (1, None),
    "num_speculative_tokens": (0, MAX_SPECULATIVE_TOKENS),
    "thinking_token_budget": (0, None),
}
_MAX_LOGIT_BIAS = 100.0
_MAX_PATTERN_SIZE = 1000
"""Tokens of the longest repeated pattern that engines look for."""
_TOP_K_OFF = -1
"""How vLLM spells a ``top_k`` that is switched off."""
_PATH = "sampling_params"


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that a model's generation_config.json gives. Raises ConfigError when one of them is out of range.

    The sampling filters count only where the model asks to be sampled from (``do_sample``), the repetition penalty always.
    """
    defaults: dict[str, Any] = {}
    if generation_config.get("do_sample"):
        defaults = {k: generation_config[k] for k in _SAMPLING_DEFAULTS if generation_config.get(k) is not None}
    if generation_config.get("repetition_penalty") is not None:
        defaults["repetition_penalty"] = generation_config["repetition_penalty"]
    if generation_config.get("max_new_tokens") is not None:
        defaults["max_tokens"] = generation_config["max_new_tokens"]
    defaults = _with_top_k(defaults)
    try:
        _check_values(SamplingParams(**defaults))
    except (InvalidArgument, TypeError) as e:
        raise ConfigError(f"generation_config.json of the model: {e}") from None
    return defaults


def resolve(given: Mapping[str, Any], defaults: Mapping[str, Any], limits: LimitsConfig) -> SamplingParams:
    """The parameters of a request: what is given, else the model's defaults, else ours; the seed always concrete.

    Raises InvalidArgument naming the field, the value and the limit.
    """
    params = SamplingParams(**_with_top_k({"seed": random.getrandbits(63), **defaults, **given}))
    _check_values(params)
    if not 1 <= params.n <= limits.max_n:
        _refuse("n", params.n, f"from 1 to {limits.max_n}")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        _refuse("min_tokens", params.min_tokens, f"at most {_PATH}.max_tokens, which is {params.max_tokens}")
    _check_counts(params, limits)
    _check_texts("stop", params.stop, "max_stop_string_chars", limits)
    _check_texts("bad_words", params.bad_words, "max_bad_word_chars", limits)
    if params.stop and not params.detokenize:
        raise InvalidArgument(f"{_PATH}.stop needs {_PATH}.detokenize", field=f"{_PATH}.stop")
    _check_logit_bias(params.logit_bias)
    if params.structured_output is not None:
        _check_structured_output(params.structured_output, limits)
    if params.repetition_detection is not None:
        _check_repetition(params.repetition_detection)
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
            _refuse("logit_bias", f"given for token id {token_id}", f"for ids below the vocabulary size, {vocab_size}")


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        _refuse(f"{name}[{index}]", token_ids[index], f"below the vocabulary size, {vocab_size}")


def _check_values(params: SamplingParams) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(params, name)
        if value is None:
            continue
        # Written so that NaN fails.
        if not value >= low or (high is not None and not value <= high):
            _refuse(name, value, f"at least {low}" if high is None else f"from {low:g} to {high:g}")
    if params.seed is not None and not MIN_SEED <= params.seed <= MAX_SEED:
        _refuse("seed", params.seed, f"from {MIN_SEED} to {MAX_SEED}")
    if not 0.0 < params.top_p <= 1.0:
        _refuse("top_p", params.top_p, "above 0 and at most 1")
    if not 0.0 < params.repetition_penalty < math.inf:
        _refuse("repetition_penalty", params.repetition_penalty, "above 0 and finite")


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


def _check_logit_bias(logit_bias: Mapping[int, float]) -> None:
    for token_id, bias in logit_bias.items():
        if not -_MAX_LOGIT_BIAS <= bias <= _MAX_LOGIT_BIAS:
            field = f"{_PATH}.logit_bias"
            limit = f"from {-_MAX_LOGIT_BIAS:g} to {_MAX_LOGIT_BIAS:g}"
            raise InvalidArgument(f"{field} of token id {token_id} is {bias}; it must be {limit}", field=field)


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


def _check_repetition(detection: RepetitionDetection) -> None:
    name, low, high = "repetition_detection", detection.min_pattern_size, detection.max_pattern_size
    if low < 1:
        _refuse(f"{name}.min_pattern_size", low, "at least 1")
    if not low <= high <= _MAX_PATTERN_SIZE:
        limit = f"at least min_pattern_size, which is {low}, and at most {_MAX_PATTERN_SIZE}"
        _refuse(f"{name}.max_pattern_size", high, limit)
    if detection.min_count < 2:
        _refuse(f"{name}.min_count", detection.min_count, "at least 2")


def _refuse_size(field: str, size: int, what: str, limit: str, limits: LimitsConfig) -> None:
    raise InvalidArgument(f"{field} has {size} {what}; limits.{limit} is {getattr(limits, limit)}", field=field)


def _refuse(name: str, value: object, limit: str) -> None:
    raise InvalidArgument(f"{_PATH}.{name} is {value}; it must be {limit}", field=f"{_PATH}.{name}")
