"""What a request must satisfy before it may be queued. Pure checks, safe on any thread."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.pooling_validation import PoolingLimits, refuse_generation, validate_pooling

MAX_SEED = 2**64 - 1

_NOT_SERVED_YET: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": {},
    "allowed_token_ids": (),
    "bad_words": (),
    "structured_output": None,
    "repetition_detection": None,
}
"""Sampling parameters engines refuse until they serve them, with the value that means unset."""


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's limits: ``max_model_len`` in tokens, token ids below ``vocab_size``. ``pooling`` None: it generates."""

    max_model_len: int
    vocab_size: int
    pooling: PoolingLimits | None = None


def validate_request(request: EngineCoreRequest, limits: RequestLimits) -> None:
    """Raise InvalidArgument or Unimplemented, naming the field, unless the engine can serve ``request``."""
    if not request.request_id:
        raise InvalidArgument("request_id is empty", field="request_id")
    if request.pooling_params is not None:
        validate_pooling(request, limits.pooling, limits.max_model_len)
    elif limits.pooling is not None:
        refuse_generation(limits.pooling)
    _check_prompt(request, limits)
    _check_token_ids("prior_output_token_ids", request.prior_output_token_ids, limits.vocab_size)
    _check_sampling(request.sampling_params, limits.vocab_size)
    if request.deadline is not None and not math.isfinite(request.deadline):
        raise InvalidArgument(f"deadline is {request.deadline}; it must be finite", field="deadline")
    if request.attempt < 0:
        raise InvalidArgument(f"attempt is {request.attempt}; it must be at least 0", field="attempt")
    if request.priority != 0:
        raise Unimplemented(f"priority is {request.priority}; priorities are not served yet", field="priority")
    if request.data_parallel_rank not in (None, 0):
        raise InvalidArgument(
            f"data_parallel_rank is {request.data_parallel_rank}; this engine is rank 0 of 1",
            field="data_parallel_rank",
        )


def _check_prompt(request: EngineCoreRequest, limits: RequestLimits) -> None:
    length, longest = len(request.prompt_token_ids), limits.max_model_len - 1
    if length == 0:
        raise InvalidArgument("prompt_token_ids is empty; it must hold at least one token", field="prompt_token_ids")
    if length > longest and request.pooling_params is None:
        raise InvalidArgument(
            f"prompt_token_ids has {length} tokens; at most {longest} leave room for one output token "
            f"within max_model_len {limits.max_model_len}",
            field="prompt_token_ids",
        )
    _check_token_ids("prompt_token_ids", request.prompt_token_ids, limits.vocab_size)


def _check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        return
    worst = low if (low := min(token_ids)) < 0 else max(token_ids)
    if not 0 <= worst < vocab_size:
        raise InvalidArgument(
            f"{field}[{list(token_ids).index(worst)}] is {worst}; token ids go from 0 to {vocab_size - 1}", field=field
        )


def _check_sampling(params: SamplingParams, vocab_size: int) -> None:
    for name, unset in _NOT_SERVED_YET.items():
        if (value := getattr(params, name)) != unset:
            shown = f" is {value}; it" if isinstance(value, int | float) else ""
            raise Unimplemented(f"sampling_params.{name}{shown} is not served yet", field=f"sampling_params.{name}")
    if params.n != 1:
        raise InvalidArgument(
            f"sampling_params.n is {params.n}; engines take one sequence per request", field=_path("n")
        )
    _check_number("temperature", params.temperature, low=0.0)
    _check_number("top_p", params.top_p, low=0.0, high=1.0, exclude_low=True)
    _check_number("min_p", params.min_p, low=0.0, high=1.0)
    _check_number("top_k", params.top_k, low=0)
    _check_number("min_tokens", params.min_tokens, low=0)
    if params.max_tokens is not None:
        _check_number("max_tokens", params.max_tokens, low=1)
        if params.min_tokens > params.max_tokens:
            raise InvalidArgument(
                f"sampling_params.min_tokens is {params.min_tokens}; max_tokens, {params.max_tokens}, is its limit",
                field=_path("min_tokens"),
            )
    if params.seed is not None:
        _check_number("seed", params.seed, low=0, high=MAX_SEED)
    elif not params.greedy:
        raise InvalidArgument(
            f"sampling_params.seed is unset; at temperature {params.temperature} engines need one",
            field=_path("seed"),
        )
    _check_token_ids(_path("stop_token_ids"), params.stop_token_ids, vocab_size)


def _check_number(name: str, value: float, *, low: float, high: float = math.inf, exclude_low: bool = False) -> None:
    too_low = value <= low if exclude_low else value < low
    if math.isfinite(value) and not too_low and value <= high:
        return
    above = "above" if exclude_low else "at least"
    limit = f"{above} {low}" if high == math.inf else f"{above} {low} and at most {high}"
    raise InvalidArgument(f"sampling_params.{name} is {value}; it must be {limit}", field=_path(name))


def _path(name: str) -> str:
    return f"sampling_params.{name}"
