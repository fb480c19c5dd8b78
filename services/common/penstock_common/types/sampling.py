"""Sampling parameters as the engine and the frontend see them."""

import enum
from typing import Any

import msgspec

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
"""Seeds are signed 64-bit integers. A draw is keyed by a seed's 64 bits, so each of them is a seed of its own."""
MAX_SPECULATIVE_TOKENS = 32
"""Tokens that are drafted of a request in a step, at most, whatever engines and requests say."""


class OutputKind(enum.IntEnum):
    """What each message of an output stream carries. Values equal ``penstock.common.v1.OutputKind``."""

    DELTA = 1
    CUMULATIVE = 2
    FINAL = 3


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True):
    """When to end a request that repeats itself (finish reason REPETITION)."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


class JsonWhitespace(enum.IntEnum):
    """Which blanks JSON is written with. Values equal ``penstock.common.v1.JsonWhitespace``, which explains them."""

    DUMPS = 1
    COMPACT = 2
    ANY = 3


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the output text. Exactly one field is set besides ``json_whitespace``, which is for the JSON in it."""

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
        """Whether there is a constraint at all."""
        return bool(self._given)

    @property
    def constraint(self) -> tuple[str, Any]:
        """Name and value of the constraint that is set. Raises ValueError unless it is exactly one, and goes with the others."""
        given = self._given
        if len(given) != 1:
            names = " and ".join(name for name, _ in given) or "none"
            raise ValueError(f"a structured output has exactly one constraint; {names} is set")
        if self.json_whitespace is not JsonWhitespace.DUMPS and given[0][0] not in _WITH_JSON:
            blanks, kinds = self.json_whitespace.name, f"{', '.join(_WITH_JSON[:-1])} and {_WITH_JSON[-1]}"
            raise ValueError(f"json_whitespace is {blanks} beside {given[0][0]}; it only goes with {kinds}")
        return given[0]


CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
_WITH_JSON = ("json_schema", "json_object", "structural_tag")
"""The constraints that JSON may come of."""
_UNSET: tuple[Any, ...] = (None, False, ())


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the next token. Field for field ``penstock.common.v1.SamplingParams``.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 switch the filters off. ``seed`` is concrete by the time
    a request reaches an engine: the draw for output index i is a function of (seed, i) alone. See ``MIN_SEED`` and ``MAX_SEED``.
    ``num_speculative_tokens``: of an engine that speculates, drafts in a step at most; 0 is none, None leaves it to the engine.
    ``max_tokens`` None means: up to ``max_model_len``. ``bad_words`` are the client's; engines ban ``bad_word_token_ids``.
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

    @property
    def greedy(self) -> bool:
        """True when the next token is the argmax of the logits."""
        return self.temperature == 0.0
