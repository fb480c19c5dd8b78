"""What completions and chat completions have in common: sampling parameters, streaming, ids."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.sampling import MAX_SEED, MIN_SEED, OutputKind, RepetitionDetection, SamplingParams
from penstock_frontend.api.openai.body_fields import check_range, shown
from penstock_frontend.api.openai.constraints import ConstraintFields, constraint_names, constraint_of
from penstock_frontend.api.openai.other_names import other_names, unify
from penstock_frontend.api.openai.prediction import NAMES, PredictionBody
from penstock_frontend.api.openai.response_format import Constraint
from penstock_frontend.call_types import Finish, KvParams
from penstock_frontend.dispatch.kv_transfer_params import KvGateway, answer_of
from penstock_frontend.telemetry.call_warnings import WarningKind, warn

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]

_INT32 = 2**31
_RANGES: dict[str, tuple[float, float]] = {
    "n": (1, _INT32 - 1),
    "max_tokens": (0, _INT32 - 1),
    "min_tokens": (0, _INT32 - 1),
    "top_k": (-1, _INT32 - 1),
    "seed": (MIN_SEED, MAX_SEED),
    "prompt_logprobs": (-1, _INT32 - 1),
    "truncate_prompt_tokens": (-1, _INT32 - 1),
    "repetition_penalty": (0.0, 1e38),
    "stream_interval": (1, _INT32 - 1),
    "num_speculative_tokens": (0, _INT32 - 1),
    "thinking_token_budget": (-1, _INT32 - 1),
}
"""What the engine's contract can carry; the domain's own limits are narrower."""
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream says about tokens: in one more chunk at its end, or in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionFields(msgspec.Struct, frozen=True):
    """Ends an output that repeats a pattern of so many tokens, from the least to the most, ``min_count`` times."""

    max_pattern_size: Annotated[int, msgspec.Meta(ge=0, le=_INT32)]
    min_pattern_size: Annotated[int, msgspec.Meta(ge=0, le=_INT32)] = 1
    min_count: Annotated[int, msgspec.Meta(ge=0, le=_INT32)] = 2


class SamplingFields(ConstraintFields, kw_only=True):
    """The common fields of both bodies, OpenAI's and vLLM's. Null is unset. ``truncate_prompt_tokens``: the last so many of the
    prompt, -1 as many as leave room for the output. ``num_speculative_tokens`` is our own, and ``prediction`` in completions.
    """

    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    stream_interval: int | None = None
    num_speculative_tokens: int | None = None
    thinking_token_budget: int | None = None
    prediction: PredictionBody | None = None
    repetition_detection: RepetitionFields | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: Any = None


_OTHER_FORMS = (*_LISTS, "stop", "repetition_detection")
_PLAIN = tuple(
    name
    for name in SamplingFields.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in _OTHER_FORMS
)
"""The fields that are parameters as they stand."""


def check(body: SamplingFields) -> None:
    """Raise InvalidArgument or Unimplemented for what can be said of the common fields without the domain, and give
    parameters under other names ours.
    """
    unify(body)
    for name, (low, high) in _RANGES.items():
        check_range(name, getattr(body, name), low, high)
    if body.truncation_side not in (None, "left"):
        raise Unimplemented(
            f"truncation_side is {shown(body.truncation_side)}; only 'left' is served", field="truncation_side"
        )
    if body.stream_options is not None and not body.stream:
        warn(WarningKind.HINT_IGNORED, "stream_options", "has no effect without stream")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs is set; a stream has none", field="prompt_logprobs")


def kv_params(body: SamplingFields, gateway: KvGateway, *, num_sequences: int, of: str = "n") -> KvParams:
    """What is said of keys and values. ``of``: the field that says how many sequences. Raises Unimplemented, InvalidArgument."""
    return gateway.read(body.kv_transfer_params, n=num_sequences, field="kv_transfer_params", of=of)


def kv_answer(finishes: Iterable[Finish | None]) -> dict[str, Any] | msgspec.UnsetType:
    """The parameters of an answer whose sequences ended so: of the only one that has some."""
    answers = [said for finish in finishes if finish is not None and (said := answer_of(finish)) is not None]
    return answers[0] if len(answers) == 1 else msgspec.UNSET


def values(body: SamplingFields, own: Constraint | None = None) -> dict[str, Any]:
    """The sampling parameters that are set, under the names of ``SamplingParams``. ``own``: the constraint in the form of the
    body's own protocol. Raises InvalidArgument.
    """
    found: dict[str, Any] = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    found |= {name: tuple(value) for name in _LISTS if (value := getattr(body, name)) is not None}
    if found.get("thinking_token_budget") == -1:
        del found["thinking_token_budget"]
    if body.stop is not None:
        found["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if (constraint := constraint_of(body, own)) is not None:
        found["structured_output"] = constraint
    if body.repetition_detection is not None:
        found["repetition_detection"] = RepetitionDetection(**msgspec.structs.asdict(body.repetition_detection))
    found["output_kind"] = OutputKind.DELTA if body.stream else OutputKind.FINAL
    return found


def names(body: SamplingFields, own: Constraint | None = None) -> Mapping[str, str]:
    """Return our names of fields to the client's, for errors that come from behind this API. ``own``: see ``values``."""
    return {**NAMES, **other_names(body), **constraint_names(body, own)}
