"""Settings of speculative decoding: a drafter proposes tokens, and a step verifies several of them together."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.config.settings import ByteSize
from penstock_common.errors import ConfigError

Method = Literal["", "prediction", "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"]
_WITH_MODEL = ("draft_model", "eagle", "eagle3")
"""Methods of speculative decoding that need a separate checkpoint for the drafter."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding: a drafter proposes tokens, and one step verifies several of them. Speculative decoding does
    not change the tokens of greedy or seeded requests. If vLLM has the same setting, the name is the same.
    """

    method: Annotated[
        Method,
        Meta(
            description=(
                "Method that drafts tokens. ngram: search the request for its last tokens. suffix: search earlier "
                "outputs too. draft_model: use a smaller model with the same vocabulary. eagle, eagle3: use a head on "
                "the model's hidden states. mtp: use the multi-token-prediction layer of the model's own checkpoint. "
                "prediction: use only the client's prediction, and text that a constraint forces. Every other method "
                "uses the prediction and forced text first. Empty disables speculative decoding."
            )
        ),
    ] = ""
    model: Annotated[str, Meta(description="Directory or hub id of the draft model or head.")] = ""
    revision: Annotated[str, Meta(description="Branch, tag or commit of the draft model or head on the hub.")] = ""
    num_speculative_tokens: Annotated[
        int, Meta(ge=1, le=32, description="Maximum number of drafted tokens per request and step.")
    ] = 5
    prompt_lookup_min: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Minimum number of tokens that ngram must match to draft.",
        ),
    ] = 2
    prompt_lookup_max: Annotated[
        int, Meta(ge=1, le=64, description="Maximum number of tokens that ngram tries to match.")
    ] = 5
    suffix_decoding_max_tree_depth: Annotated[
        int, Meta(ge=2, le=256, description="Maximum number of matched and drafted tokens of suffix, together.")
    ] = 24
    suffix_decoding_max_spec_factor: Annotated[
        float, Meta(ge=0, le=64, description="Maximum number of tokens that suffix drafts per matched token.")
    ] = 2.0
    suffix_decoding_min_token_prob: Annotated[
        float, Meta(ge=0, le=1, description="Minimum observed probability of a token for suffix to draft it.")
    ] = 0.1
    suffix_decoding_cache_bytes: Annotated[
        ByteSize,
        Meta(
            ge=0,
            description=(
                "Bytes of memory for the finished outputs that the method suffix searches. 0: no finished outputs are "
                "searched."
            ),
        ),
    ] = 64 * 1024 * 1024
    draft_sampling: Annotated[
        Literal["auto", "greedy", "coupled"],
        Meta(
            description=(
                "Token choice of a draft model or head for randomly sampled requests. greedy: the likeliest token. "
                "coupled: sample with the request's own random numbers. auto: the choice whose drafts were accepted "
                "more often for this request."
            )
        ),
    ] = "auto"
    adaptive: Annotated[
        bool,
        Meta(
            description=(
                "Choose the number of drafts from their past acceptance and the measured cost of steps. The chosen "
                "number may be 0. false: always draft the maximum."
            )
        ),
    ] = True

    def __post_init__(self) -> None:
        check_fields("speculative", self)
        if self.method in _WITH_MODEL and not self.model:
            raise ConfigError(
                f"speculative.method is {self.method}, but speculative.model is empty; set it to the path or hub "
                "id of the draft model or draft head"
            )
        if self.model and self.method == "mtp":
            raise ConfigError(
                f"speculative.model is {self.model!r}, but speculative.method mtp uses a layer of the served model's own "
                "checkpoint; leave speculative.model empty"
            )
        if self.model and self.method not in _WITH_MODEL:
            raise ConfigError(
                f"speculative.model is {self.model!r}, but speculative.method is {self.method!r}; only "
                f"{', '.join(_WITH_MODEL)} use a model"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative.prompt_lookup_min is {self.prompt_lookup_min}; it must be at most "
                f"speculative.prompt_lookup_max, {self.prompt_lookup_max}"
            )

    @property
    def enabled(self) -> bool:
        """Whether tokens may be drafted."""
        return bool(self.method)

    @property
    def has_model(self) -> bool:
        """Whether the drafter is a model, a head or a layer with its own weights and KV cache."""
        return self.method in (*_WITH_MODEL, "mtp")
