"""Constrained decoding."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.config.settings import ByteSize


class StructuredOutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constrained decoding."""

    backend: Annotated[
        Literal["xgrammar"], Meta(description="Name of the library that compiles and follows constraints.")
    ] = "xgrammar"
    compile_timeout: Annotated[
        float,
        Meta(
            ge=0.1,
            le=600,
            description="Seconds of processor time that a constraint may take to compile, six times as many by the clock.",
        ),
    ] = 10.0
    compile_memory: Annotated[
        ByteSize,
        Meta(
            ge=64 * 1024 * 1024,
            description="Bytes that a constraint may take in the compiling process, on top of what that process needs itself; "
            "part of the engine's memory.",
        ),
    ] = 1024 * 1024 * 1024
    max_constraint_bytes: Annotated[
        ByteSize, Meta(ge=1, le=16 * 1024 * 1024, description="Bytes of a constraint's text.")
    ] = 256 * 1024
    cache_size: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Compiled constraints that are kept, of up to some 16 MB each at 128 000 tokens of vocabulary.",
        ),
    ] = 64
    token_budget: Annotated[
        float,
        Meta(
            ge=0.001,
            le=10,
            description="Seconds of processor time that a constraint may take to follow one token of one request; a step waits a "
            "quarter of it at most.",
        ),
    ] = 0.02
    follow_memory: Annotated[
        ByteSize,
        Meta(
            ge=256 * 1024 * 1024,
            description="Bytes that all constraints that are followed may take together; part of the engine's memory.",
        ),
    ] = 4 * 1024 * 1024 * 1024
    enable_in_reasoning: Annotated[
        bool,
        Meta(description="Constraints hold from the first token on, also where a model would reason first."),
    ] = False

    def __post_init__(self) -> None:
        check_fields("structured_output", self)
