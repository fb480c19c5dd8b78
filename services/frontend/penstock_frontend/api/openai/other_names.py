"""Other servers' names of sampling parameters that mean the same here."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_common.types.sampling import MAX_SEED, MIN_SEED
from penstock_frontend.api.openai.body_fields import check_range, shown
from penstock_frontend.api.openai.context import GenerationContextFields

_INT32_MAX = 2**31 - 1
_NAMES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict"),
    "min_tokens": ("min_new_tokens",),
    "stop": ("stop_sequences",),
    "seed": ("random_seed",),
}
"""Our names to the others."""
_UNLIMITED: Mapping[str, tuple[int, ...]] = {"n_predict": (-1,), "num_predict": (-1, -2)}
"""Values of llama.cpp and Ollama that set no limit."""
_RANGES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(_NAMES["max_tokens"], (1, _INT32_MAX)),
    "min_new_tokens": (0, _INT32_MAX),
    "random_seed": (MIN_SEED, MAX_SEED),
}


class OtherNames(GenerationContextFields, kw_only=True):
    """The fields of bodies of text generation that are other names. ``max_completion_tokens`` and ``max_output_tokens`` are
    OpenAI's, ``n_predict`` llama.cpp's, ``num_predict`` Ollama's, ``max_new_tokens`` TGI's and SGLang's, ``min_new_tokens``
    SGLang's, ``stop_sequences`` Anthropic's and Cohere's, ``random_seed`` Mistral's.
    """

    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    max_new_tokens: int | None = None
    n_predict: int | None = None
    num_predict: int | None = None
    min_new_tokens: int | None = None
    stop_sequences: str | list[str] | None = None
    random_seed: int | None = None


def unify(body: OtherNames) -> None:
    """Set the fields with our names to what other names say. ``max_completion_tokens`` wins over ``max_tokens``.

    Raises:
        InvalidArgument: A value is out of range, or two names of a parameter say different things.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(body, name)
        if value not in _UNLIMITED.get(name, ()):
            check_range(name, value, low, high)
    for ours, others in _NAMES.items():
        given = {name: getattr(body, name) for name in others if _is_given(body, name)}
        if not given:
            continue
        if (value := getattr(body, ours)) is not None and "max_completion_tokens" not in given:
            given = {ours: value, **given}
        _check_same(given)
        setattr(body, ours, next(iter(given.values())))


def other_names(body: OtherNames) -> Mapping[str, str]:
    """Return our names of the parameters that the body gives under other names, as errors have them, to these."""
    return {
        f"sampling_params.{ours}": name
        for ours, others in _NAMES.items()
        for name in reversed(others)
        if _is_given(body, name)
    }


def _is_given(body: msgspec.Struct, name: str) -> bool:
    value = getattr(body, name)
    return value is not None and value not in _UNLIMITED.get(name, ())


def _check_same(given: Mapping[str, Any]) -> None:
    (first, value), *rest = given.items()
    for name, other in rest:
        if other != value:
            raise InvalidArgument(
                f"{first} is {shown(value)} and {name} is {shown(other)}; they are two names of the same, so set one",
                field=name,
            )
