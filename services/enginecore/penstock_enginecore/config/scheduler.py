"""Limits of a step and of the queue."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields

STEP_TOKENS = 2048
"""Of a step, unless the configuration or the model says otherwise."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a step and of the queue."""

    max_num_batched_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Tokens of a step; unset: 512 on CPUs where prompts may be split, so that the first of them have "
                "their tokens before the last are computed, else 2048.",
            ),
        ]
        | None
    ) = None
    max_prompt_batch_tokens: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="Prompts begin in a step together while they have this many tokens at most, and a longer one alone. "
                "Beside requests that decode, which wait for the whole of a step, it has half as many tokens of prompts at most, "
                "and none while a tower for images, sound or video computes: they take turns. 0: as many as the step has room "
                "for. Unset: 256 on CPUs, where more of them in a step have their first tokens later and none sooner, else 0.",
            ),
        ]
        | None
    ) = None
    max_num_encoder_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="What a step spends on images, sound and video at most, in embeddings times blocks of the model's "
            "tower; one block at least. Less makes pauses of other requests shorter. 0: as much as max_num_batched_tokens.",
        ),
    ] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, le=65_536, description="Requests that run at once.")] = 256
    policy: Annotated[
        Literal["fcfs", "priority"],
        Meta(
            description="Order of requests: as they come, or those with a lower priority number first, which also take blocks "
            "from those with a higher one."
        ),
    ] = "fcfs"
    fairness: Annotated[
        bool,
        Meta(
            description="Tenants take turns by their weights, each with its requests in the policy's order; under priority "
            "among requests of one number."
        ),
    ] = True
    scheduler: Annotated[str, Meta(description="Name of the scheduler: default, or one that a plugin brings.")] = (
        "default"
    )
    async_scheduling: (
        Annotated[
            bool,
            Meta(description="Prepare a step while the one before it runs; the tokens are the same; unset: on GPUs."),
        ]
        | None
    ) = None
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="Prompt tokens of one request in a step, at most; 0: no limit.")
    ] = 0
    enable_chunked_prefill: Annotated[bool, Meta(description="Split long prompts over steps.")] = True
    watermark: Annotated[
        float,
        Meta(ge=0, le=0.5, description="Fraction of the KV blocks kept free when a waiting request is admitted."),
    ] = 0.01
    max_waiting_requests: Annotated[
        int, Meta(ge=1, description="Waiting requests beyond which new ones are refused with RESOURCE_EXHAUSTED.")
    ] = 10_000
    max_waiting_tokens: Annotated[
        int,
        Meta(ge=1, description="Waiting prompt tokens beyond which new requests are refused with RESOURCE_EXHAUSTED."),
    ] = 50_000_000

    def __post_init__(self) -> None:
        check_fields("scheduler", self)

    @property
    def by_priority(self) -> bool:
        """Whether requests with a lower number go first."""
        return self.policy == "priority"

    @property
    def step_tokens(self) -> int:
        """``max_num_batched_tokens``; unset: the most that a model may leave it at."""
        return STEP_TOKENS if self.max_num_batched_tokens is None else self.max_num_batched_tokens
