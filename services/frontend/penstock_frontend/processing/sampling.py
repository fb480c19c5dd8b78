"""Sampling parameters of a request: the model's defaults, then ours, and the limits of each."""

import random
from collections.abc import Mapping
from typing import Any

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_common.logging import get_logger
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.config import LimitsConfig

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")
_RANGES: dict[str, tuple[float, float | None]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, None),
    "min_p": (0.0, 1.0),
    "max_tokens": (1, None),
    "stream_interval": (1, None),
    "truncate_prompt_tokens": (1, None),
}
_PATH = "sampling_params"


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that a model's generation_config.json gives. Raises ConfigError when one of them is out of range.

    The sampling filters count only where the model asks to be sampled from (``do_sample``).
    """
    defaults: dict[str, Any] = {}
    if generation_config.get("do_sample"):
        defaults = {k: generation_config[k] for k in _SAMPLING_DEFAULTS if generation_config.get(k) is not None}
        if generation_config.get("repetition_penalty", 1.0) != 1.0:
            get_logger().warning("generation_config: repetition_penalty is not served yet and left out")
    if generation_config.get("max_new_tokens") is not None:
        defaults["max_tokens"] = generation_config["max_new_tokens"]
    try:
        _check_values(SamplingParams(**defaults))
    except (InvalidArgument, TypeError) as e:
        raise ConfigError(f"generation_config.json of the model: {e}") from None
    return defaults


def resolve(given: Mapping[str, Any], defaults: Mapping[str, Any], limits: LimitsConfig) -> SamplingParams:
    """The parameters of a request: what is given, else the model's defaults, else ours; the seed always concrete.

    Raises InvalidArgument naming the field, the value and the limit.
    """
    params = SamplingParams(**{"seed": random.getrandbits(63), **defaults, **given})
    _check_values(params)
    _check_stops(params, limits)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        _refuse("min_tokens", params.min_tokens, f"at most max_tokens, which is {params.max_tokens}")
    return params


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidArgument when a stop token id does not exist."""
    for index, token_id in enumerate(params.stop_token_ids):
        if token_id >= vocab_size:
            _refuse(f"stop_token_ids[{index}]", token_id, f"below the vocabulary size, {vocab_size}")


def _check_values(params: SamplingParams) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(params, name)
        if value is None:
            continue
        # Written so that NaN fails.
        if not value >= low or (high is not None and not value <= high):
            _refuse(name, value, f"at least {low}" if high is None else f"from {low:g} to {high:g}")
    if not 0.0 < params.top_p <= 1.0:
        _refuse("top_p", params.top_p, "above 0 and at most 1")


def _check_stops(params: SamplingParams, limits: LimitsConfig) -> None:
    if len(params.stop) > limits.max_stop_strings:
        raise _too_many("stop", len(params.stop), "strings", limits.max_stop_strings)
    if len(params.stop_token_ids) > limits.max_stop_token_ids:
        raise _too_many("stop_token_ids", len(params.stop_token_ids), "ids", limits.max_stop_token_ids)
    for index, stop in enumerate(params.stop):
        field = f"{_PATH}.stop[{index}]"
        if not stop:
            raise InvalidArgument(f"{field} is empty", field=field)
        if len(stop) > limits.max_stop_string_chars:
            raise InvalidArgument(
                f"{field} has {len(stop)} characters; the limit is {limits.max_stop_string_chars}", field=field
            )
    if params.stop and not params.detokenize:
        raise InvalidArgument(f"{_PATH}.stop needs {_PATH}.detokenize", field=f"{_PATH}.stop")


def _too_many(name: str, count: int, what: str, limit: int) -> InvalidArgument:
    return InvalidArgument(f"{_PATH}.{name} has {count} {what}; the limit is {limit}", field=f"{_PATH}.{name}")


def _refuse(name: str, value: object, limit: str) -> None:
    raise InvalidArgument(f"{_PATH}.{name} is {value}; it must be {limit}", field=f"{_PATH}.{name}")
