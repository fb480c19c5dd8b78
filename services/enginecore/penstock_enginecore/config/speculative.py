"""Speculation: tokens that are guessed ahead and verified several to a step."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.config.settings import ByteSize
from penstock_common.errors import ConfigError

Method = Literal["", "prediction", "ngram", "suffix", "draft_model", "eagle", "eagle3"]
_WITH_MODEL = ("draft_model", "eagle", "eagle3")


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculation: tokens that are guessed ahead and verified several to a step. It changes no token of a request that is greedy
    or has a seed. Names are vLLM's where it has them.
    """

    method: Annotated[
        Method,
        Meta(
            description="What drafts tokens: ngram, which looks the last ones up in the request; suffix, in what was put "
            "out before, too; draft_model, a smaller model of the same vocabulary; eagle and eagle3, a head on the model's "
            "hidden states; prediction, nothing but what clients give as such, and text that a constraint leaves no choice of; "
            "any method drafts these first. Empty: nothing is drafted."
        ),
    ] = ""
    model: Annotated[str, Meta(description="Directory or name of the draft model or head.")] = ""
    revision: Annotated[str, Meta(description="Revision of the draft model or head.")] = ""
    num_speculative_tokens: Annotated[
        int, Meta(ge=1, le=32, description="Tokens that are drafted of a request in a step, at most.")
    ] = 5
    prompt_lookup_min: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Tokens that must have come before in the same order for ngram to draft from there.",
        ),
    ] = 2
    prompt_lookup_max: Annotated[
        int, Meta(ge=1, le=64, description="Tokens that ngram looks up, where so many have come before.")
    ] = 5
    suffix_decoding_max_tree_depth: Annotated[
        int, Meta(ge=2, le=256, description="Tokens that suffix looks up and drafts together, at most.")
    ] = 24
    suffix_decoding_max_spec_factor: Annotated[
        float, Meta(ge=0, le=64, description="Tokens that suffix drafts for each token it has found, at most.")
    ] = 2.0
    suffix_decoding_min_token_prob: Annotated[
        float, Meta(ge=0, le=1, description="How often of all times a token must have followed for suffix to draft it.")
    ] = 0.1
    suffix_decoding_cache_bytes: Annotated[
        ByteSize,
        Meta(ge=0, description="Bytes of what suffix remembers of outputs that have ended; 0: it remembers none."),
    ] = 64 * 1024 * 1024
    draft_sampling: Annotated[
        Literal["auto", "greedy", "coupled"],
        Meta(
            description="How a draft model or head chooses for a request that is drawn at random: its likeliest token, or by the "
            "request's own random numbers; auto: whichever held more often for the request."
        ),
    ] = "auto"
    adaptive: Annotated[
        bool,
        Meta(
            description="Draft as many tokens as are worth their time by what held before and by what steps cost, which may be "
            "none; false: always as many as there may be."
        ),
    ] = True

    def __post_init__(self) -> None:
        check_fields("speculative", self)
        if self.method in _WITH_MODEL and not self.model:
            raise ConfigError(f"speculative.method is {self.method} and speculative.model empty; it names what drafts")
        if self.model and self.method not in _WITH_MODEL:
            raise ConfigError(
                f"speculative.model is {self.model!r} and speculative.method {self.method!r}; only {', '.join(_WITH_MODEL)} "
                "has one"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative.prompt_lookup_min is {self.prompt_lookup_min}; it must be at most "
                f"speculative.prompt_lookup_max, {self.prompt_lookup_max}"
            )

    @property
    def enabled(self) -> bool:
        """Whether anything may be drafted."""
        return bool(self.method)

    @property
    def has_model(self) -> bool:
        """Whether what drafts is a model, with weights and keys and values of its own."""
        return self.method in _WITH_MODEL
