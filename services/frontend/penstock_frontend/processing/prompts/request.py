"""Requests and outputs as every public protocol sees them, before and after the engine."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock_common.types.logprobs import Logprobs
from penstock_common.types.outputs import FinishReason
from penstock_common.types.request_context import RequestContext
from penstock_frontend.processing.prompts.mixed_prompt import MixedPrompt


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to continue: text, token ids, or parts of these and vectors.

    ``sampling`` holds the sampling parameters that the client set, under the names of ``SamplingParams``.
    """

    prompt: str | Sequence[int] | MixedPrompt
    sampling: dict[str, Any] = {}
    add_special_tokens: bool = True
    context: RequestContext = RequestContext()


class Usage(msgspec.Struct, frozen=True):
    """Token counts. ``completion_tokens`` counts what the engine produced, the tokens of a stop string included."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Finish(msgspec.Struct, frozen=True):
    """How an output ended. ``stop_reason``: the stop string or stop token id; None at the model's own end of sequence."""

    reason: FinishReason
    stop_reason: int | str | None
    usage: Usage


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one of the n sequences, or all of it, as the output kind says. ``finish`` is set on its last one.

    ``logprobs``: as many positions as ``token_ids``; None when they were not asked for, or there are no tokens.
    ``prompt_logprobs``: on the first piece of sequence 0, position i belongs to prompt token i + 1.
    """

    index: int = 0
    text: str
    token_ids: Sequence[int]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish: Finish | None = None
