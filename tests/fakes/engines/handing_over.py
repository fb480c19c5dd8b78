"""Helpers that act as a frontend: one engine hands a request over, and another engine resumes it."""

from collections.abc import Sequence

import msgspec

from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.outputs import EngineCoreOutput, FinishReason
from penstock_common.types.request import EngineCoreRequest
from tests.fakes.engines.transferring_engine import TransferringEngine


def tokens_of(outputs: Sequence[EngineCoreOutput]) -> list[int]:
    """Return all new tokens in a request's outputs."""
    return [token for output in outputs for token in output.new_token_ids]


def undisturbed(engine: TransferringEngine, request: EngineCoreRequest) -> list[int]:
    """Return the tokens of a request without failures. After that, the engine has dropped the request's blocks."""
    found = tokens_of(engine.run(request)[request.request_id])
    engine.core.scheduler.reset_prefix_cache()
    return found


def hand_over(source: TransferringEngine, request: EngineCoreRequest, after: int = 3) -> tuple[list[int], KvSource]:
    """Start a request, and hand it over after a number of tokens. Returns the tokens and the source of the blocks."""
    outputs = source.run(msgspec.structs.replace(request, handoff_after_tokens=after))[request.request_id]
    assert outputs[-1].finish_reason is FinishReason.HANDOFF
    assert outputs[-1].kv_source is not None
    return tokens_of(outputs), outputs[-1].kv_source


def go_on(
    target: TransferringEngine, request: EngineCoreRequest, prior: list[int], given: KvSource
) -> list[EngineCoreOutput]:
    """Resume a request after the tokens ``prior`` with the blocks of ``given``, and return its outputs."""
    again = msgspec.structs.replace(request, prior_output_token_ids=prior, kv_source=given, attempt=1)
    return target.run(again)[request.request_id]
