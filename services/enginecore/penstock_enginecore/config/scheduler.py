"""Settings of the scheduler: limits of a step and of the waiting queue."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields

STEP_TOKENS = 2048
"""Default maximum number of tokens per step, if neither the configuration nor the model sets this number."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a step and of the waiting queue."""

    max_num_batched_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                description=(
                    "Maximum tokens per step. Unset: 512 on CPUs with chunked prefill, so that the first prompts in "
                    "the queue do not wait for the last prompts; otherwise 2048."
                ),
            ),
        ]
        | None
    ) = None
    max_prompt_batch_tokens: (
        Annotated[
            int,
            Meta(
                ge=0,
                description=(
                    "Maximum tokens of prompts that begin in the same step. A longer prompt begins alone. Decoding "
                    "requests wait for the whole step. So while requests decode, prompts get at most half of this "
                    "limit per step. A step in which a vision or audio encoder computes then contains no prompt "
                    "tokens, and such steps alternate with steps for prompts. 0: no limit. Unset: 256 on CPUs, where "
                    "larger batches only delay first tokens; otherwise 0."
                ),
            ),
        ]
        | None
    ) = None
    max_num_encoder_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Maximum encoder work per step for images, audio and video: number of embeddings times number of "
                "encoder layers. A step computes at least one layer of one item. Smaller values shorten the pauses of "
                "other requests. 0: the value of max_num_batched_tokens."
            ),
        ),
    ] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, le=65_536, description="Maximum number of running requests.")] = 256
    policy: Annotated[
        Literal["fcfs", "priority"],
        Meta(
            description=(
                "Order of waiting requests. fcfs: first come, first served. priority: lower priority numbers first; "
                "such requests also preempt running requests with higher numbers."
            )
        ),
    ] = "fcfs"
    fairness: Annotated[
        bool,
        Meta(
            description=(
                "Share the engine between tenants in proportion to their weights. The policy orders the requests of "
                "each tenant. With the priority policy, fairness applies only among requests with the same priority "
                "number."
            )
        ),
    ] = True
    scheduler: Annotated[str, Meta(description="Name of the scheduler: default, or one that a plugin registers.")] = (
        "default"
    )
    async_scheduling: (
        Annotated[
            bool,
            Meta(
                description=(
                    "Prepare each step while the previous step runs. The tokens stay the same. Unset: true on GPUs, "
                    "otherwise false."
                )
            ),
        ]
        | None
    ) = None
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="Maximum prompt tokens of one request per step. 0: no limit.")
    ] = 0
    enable_chunked_prefill: Annotated[bool, Meta(description="Split long prompts over several steps.")] = True
    watermark: Annotated[
        float,
        Meta(ge=0, le=0.5, description="Fraction of the KV blocks that must stay free when a waiting request starts."),
    ] = 0.01
    max_waiting_requests: Annotated[
        int,
        Meta(
            ge=1,
            description=("Maximum number of waiting requests. Further requests are refused with RESOURCE_EXHAUSTED."),
        ),
    ] = 10_000
    max_waiting_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description=(
                "Maximum number of waiting prompt tokens. Further requests are refused with RESOURCE_EXHAUSTED."
            ),
        ),
    ] = 50_000_000

    def __post_init__(self) -> None:
        check_fields("scheduler", self)

    @property
    def by_priority(self) -> bool:
        """Whether requests with a lower priority number are scheduled first."""
        return self.policy == "priority"

    @property
    def step_tokens(self) -> int:
        """Value of ``max_num_batched_tokens``, or the default ``STEP_TOKENS`` if the setting is unset."""
        return STEP_TOKENS if self.max_num_batched_tokens is None else self.max_num_batched_tokens
