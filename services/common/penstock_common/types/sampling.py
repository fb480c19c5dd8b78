"""Sampling parameters, as the engine and the frontend use them."""

import enum
import math
from typing import Any, NamedTuple, NoReturn

import msgspec

from penstock_common.errors import InvalidArgument

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
"""Range of seeds: signed 64-bit integers. Draws depend on all 64 bits, so different seeds give different draws."""
MAX_SPECULATIVE_TOKENS = 32
"""Maximum number of drafted tokens of a request in a step, regardless of settings and request parameters."""
FILTERS = "top_p, top_k or min_p"
"""Names of the parameters that exclude unlikely tokens from a draw. Error messages use this text in hints."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Maximum number of ``SamplingParams.logprob_token_ids``, as in vLLM."""
_MAX_PATTERN_SIZE = 1000
"""Maximum length in tokens of a repeated pattern. Engines search for patterns in every step."""
_PATH = "sampling_params"


class OutputKind(enum.IntEnum):
    """Content of each message of an output stream. Values equal ``penstock.common.v1.OutputKind``."""

    DELTA = 1
    CUMULATIVE = 2
    FINAL = 3


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True):
    """Rule that ends a request whose output repeats itself (finish reason REPETITION)."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


class JsonWhitespace(enum.IntEnum):
    """Whitespace in generated JSON. Values equal ``penstock.common.v1.JsonWhitespace``, whose comments explain the
    values.
    """

    DUMPS = 1
    COMPACT = 2
    ANY = 3


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the output text. Exactly one field is set, apart from ``json_whitespace``.

    ``json_whitespace`` applies to JSON in the output.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    structural_tag: str | None = None
    json_whitespace: JsonWhitespace = JsonWhitespace.DUMPS

    @property
    def _given(self) -> list[tuple[str, Any]]:
        return [(name, value) for name in CONSTRAINTS if (value := getattr(self, name)) not in _UNSET]

    @property
    def constrains(self) -> bool:
        """Whether a constraint on the output is set."""
        return bool(self._given)

    @property
    def constraint(self) -> tuple[str, Any]:
        """Name and value of the constraint.

        Raises ValueError if not exactly one constraint is set, or if the constraint is not compatible with
        ``json_whitespace``.
        """
        given = self._given
        if len(given) != 1:
            names = " and ".join(name for name, _ in given) or "none"
            raise ValueError(f"a structured output must have exactly one constraint, but it has: {names}")
        if self.json_whitespace is not JsonWhitespace.DUMPS and given[0][0] not in _WITH_JSON:
            blanks, kinds = self.json_whitespace.name, f"{', '.join(_WITH_JSON[:-1])} and {_WITH_JSON[-1]}"
            raise ValueError(
                f"json_whitespace is {blanks}, but the constraint is {given[0][0]}; set json_whitespace only with {kinds}"
            )
        return given[0]


CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
_WITH_JSON = ("json_schema", "json_object", "structural_tag")
"""Constraints whose output may contain JSON."""
_UNSET: tuple[Any, ...] = (None, False, ())


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stop parameters of a request, with the fields of ``penstock.common.v1.SamplingParams``.

    Args:
        n: Number of outputs per prompt.
        temperature: 0 is greedy; higher values draw less likely tokens more often.
        top_p: Draw among the most likely tokens whose probabilities sum up to this value; 1 disables the filter.
        top_k: Draw among this many most likely tokens; 0 disables the filter, and so does -1 from clients.
        min_p: Drop tokens less likely than this fraction of the most likely token's probability.
        presence_penalty: Subtracted from the logits of tokens that the output contains.
        frequency_penalty: Subtracted from the logits of tokens, once per occurrence in the output.
        repetition_penalty: Divides the logits of tokens that prompt or output contain; a value above 1 makes these
            tokens less likely.
        seed: Seed of the draws, from ``MIN_SEED`` to ``MAX_SEED``; None chooses a random seed. The draw for output
            token i depends only on the seed and i.
        max_tokens: Maximum number of output tokens; None allows up to the model's maximum length.
        min_tokens: Minimum number of output tokens before end of sequence or a stop.
        stop: Texts that end the output.
        stop_token_ids: Tokens that end the output.
        ignore_eos: Continue after the model's end of sequence.
        include_stop_str_in_output: Keep the stop text at the end of the output.
        logprobs: Number of most likely tokens with log-probabilities per output token, besides the chosen one; None for
            none.
        prompt_logprobs: Number of most likely tokens with log-probabilities per prompt token, besides the token itself;
            None for none.
        logit_bias: Added to the logits of tokens, by token ID.
        allowed_token_ids: If not empty, only these tokens are chosen.
        bad_words: Texts that are not generated.
        detokenize: Whether outputs have text.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Put spaces between special tokens in the text.
        output_kind: Content of each message of a stream. ``LLM`` ignores this field.
        stream_interval: Minimum number of output tokens per message of a stream.
        structured_output: A constraint on the output's text.
        repetition_detection: End an output that repeats itself.
        truncate_prompt_tokens: Keep only this many last tokens of the prompt; None refuses a prompt that is too long.
        skip_reading_prefix_cache: Compute the whole prompt, without cached blocks.
        bad_word_token_ids: ``bad_words`` as token IDs; set by the frontend.
        num_speculative_tokens: Maximum number of drafted tokens per step; 0 disables drafts, None lets the engine
            choose.
        thinking_token_budget: Maximum number of reasoning tokens, without the tags; None means no limit. At the limit,
            the engine forces the token that ends the reasoning.
        logprob_token_ids: Tokens with log-probabilities per output token, besides the chosen one and instead of the
            most likely tokens, in this order; at most ``MAX_LOGPROB_TOKEN_IDS``. If ``logprobs`` is set too, it must be
            0 or the number of these tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind = OutputKind.DELTA
    stream_interval: int = 1
    structured_output: StructuredOutput | None = None
    repetition_detection: RepetitionDetection | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool = False
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    num_speculative_tokens: int | None = None
    thinking_token_budget: int | None = None
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def has_logprobs(self) -> bool:
        """Whether the output has log-probabilities."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether sampling is greedy: the next token is the argmax of the logits."""
        return self.temperature == 0.0


class Bounds(NamedTuple):
    """Range of a sampling parameter. If ``above`` is True, ``low`` itself is refused."""

    low: float
    high: float = math.inf
    above: bool = False

    def allow(self, value: float) -> bool:
        """Return whether a value is within the bounds. Returns False for NaN and infinities."""
        finite = isinstance(value, int) or math.isfinite(value)
        return finite and (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        """Return the bounds as the end of an error message that begins with "it must be"."""
        if self.above:
            return f"above {self.low:g} and " + ("finite" if self.high == math.inf else f"at most {self.high:g}")
        if self.high == math.inf:
            return f"at least {self.low}"
        if isinstance(self.low, int) and isinstance(self.high, int):
            return f"from {self.low} to {self.high}"
        return f"from {self.low:g} to {self.high:g}"


BOUNDS = {
    "temperature": Bounds(0.0, 100.0),
    "top_p": Bounds(0.0, 1.0, above=True),
    "top_k": Bounds(0),
    "min_p": Bounds(0.0, 1.0),
    "presence_penalty": Bounds(-2.0, 2.0),
    "frequency_penalty": Bounds(-2.0, 2.0),
    "repetition_penalty": Bounds(0.0, above=True),
    "seed": Bounds(MIN_SEED, MAX_SEED),
    "max_tokens": Bounds(1),
    "min_tokens": Bounds(0),
    "logprobs": Bounds(-1),
    "prompt_logprobs": Bounds(-1),
    "stream_interval": Bounds(1),
    "truncate_prompt_tokens": Bounds(1),
    "num_speculative_tokens": Bounds(0, MAX_SPECULATIVE_TOKENS),
    "thinking_token_budget": Bounds(0),
}
"""Bounds of the numeric sampling parameters. Services that know the model or configured limits check stricter bounds.
"""
_LOGIT_BIAS = Bounds(-100.0, 100.0)


def check_values(params: SamplingParams) -> None:
    """Check the parameters that can be checked without a model.

    Frontends call this function when a request arrives. Engines call it before they queue the request.

    Raises:
        InvalidArgument: A value is out of bounds. The error names the field, its value and its bounds.
    """
    for name, bounds in BOUNDS.items():
        if (value := getattr(params, name)) is not None and not bounds.allow(value):
            refuse_value(name, value, bounds)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        refuse_value("min_tokens", params.min_tokens, f"at most {_PATH}.max_tokens, which is {params.max_tokens}")
    for token_id, bias in params.logit_bias.items():
        if not _LOGIT_BIAS.allow(bias):
            field = f"{_PATH}.logit_bias"
            raise InvalidArgument(f"{field} of token id {token_id} is {bias}; it must be {_LOGIT_BIAS}", field=field)
    _check_listed_logprobs(params)
    if (detection := params.repetition_detection) is not None:
        _check_repetition(detection)


def _check_listed_logprobs(params: SamplingParams) -> None:
    count, field = len(params.logprob_token_ids), f"{_PATH}.logprob_token_ids"
    if count > MAX_LOGPROB_TOKEN_IDS:
        raise InvalidArgument(f"{field} has {count} ids; the limit is {MAX_LOGPROB_TOKEN_IDS}", field=field)
    if count and params.logprobs not in (None, 0, count):
        raise InvalidArgument(
            f"{_PATH}.logprobs is {params.logprobs}, but logprob_token_ids has {count} ids, which replace the most likely "
            f"tokens; leave logprobs out, or set it to 0 or {count}",
            field=f"{_PATH}.logprobs",
        )


def _check_repetition(detection: RepetitionDetection) -> None:
    name, low, high = "repetition_detection", detection.min_pattern_size, detection.max_pattern_size
    if low < 1:
        refuse_value(f"{name}.min_pattern_size", low, "at least 1")
    if not low <= high <= _MAX_PATTERN_SIZE:
        limit = f"at least min_pattern_size, which is {low}, and at most {_MAX_PATTERN_SIZE}"
        refuse_value(f"{name}.max_pattern_size", high, limit)
    if detection.min_count < 2:
        refuse_value(f"{name}.min_count", detection.min_count, "at least 2")


def refuse_value(name: str, value: object, limit: object) -> NoReturn:
    """Raise InvalidArgument for a parameter whose value violates ``limit``."""
    raise InvalidArgument(f"{_PATH}.{name} is {value}; it must be {limit}", field=f"{_PATH}.{name}")
