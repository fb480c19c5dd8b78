"""Settings of structured output (constrained decoding)."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.config.settings import ByteSize


class StructuredOutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Structured output (constrained decoding)."""

    backend: Annotated[
        Literal["xgrammar"],
        Meta(description="Library that compiles constraints and computes token masks."),
    ] = "xgrammar"
    compile_timeout: Annotated[
        float,
        Meta(
            ge=0.1,
            le=600,
            description=(
                "Maximum seconds of CPU time to compile a constraint. The wall-clock limit is six times as long."
            ),
        ),
    ] = 10.0
    compile_memory: Annotated[
        ByteSize,
        Meta(
            ge=64 * 1024 * 1024,
            description=(
                "Maximum bytes of memory to compile a constraint, in addition to the memory that the compiling process "
                "needs without a constraint. This memory is part of the engine's memory."
            ),
        ),
    ] = 1024 * 1024 * 1024
    max_constraint_bytes: Annotated[
        ByteSize, Meta(ge=1, le=16 * 1024 * 1024, description="Maximum bytes of a constraint's text.")
    ] = 256 * 1024
    cache_size: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description=(
                "Number of compiled constraints to cache. A compiled constraint takes up to about 16 MB with a "
                "vocabulary of 128,000 tokens."
            ),
        ),
    ] = 64
    token_budget: Annotated[
        float,
        Meta(
            ge=0.001,
            le=10,
            description=(
                "Maximum seconds of processor time for a constraint to advance by one token of one request. A step "
                "waits for a constraint for at most a quarter of this time."
            ),
        ),
    ] = 0.02
    follow_memory: Annotated[
        ByteSize,
        Meta(
            ge=256 * 1024 * 1024,
            description="Maximum bytes of memory for all constraints in use, as part of the engine's memory.",
        ),
    ] = 4 * 1024 * 1024 * 1024
    enable_in_reasoning: Annotated[
        bool,
        Meta(description="Apply constraints from the first token, even if the model would reason first."),
    ] = False

    def __post_init__(self) -> None:
        check_fields("structured_output", self)
