"""What vectors that stand for prompt tokens must satisfy. Pure checks, safe on any thread."""

import numpy as np

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest

_BFLOAT16_EXPONENT = 0x7F80
"""All ones where the number is infinite or NaN."""


def check_prompt_embeds(request: EngineCoreRequest, embeds: PromptEmbeds, hidden_size: int) -> None:
    """Raise InvalidArgument, naming the field, unless an engine with vectors of ``hidden_size`` can take ``embeds``;
    Unimplemented for what is not served with vectors.
    """
    if hidden_size == 0 or request.pooling_params is not None:
        raise Unimplemented("prompt_embeds is not served by engines that pool", field="prompt_embeds")
    length = len(request.prompt_token_ids)
    if embeds.num_tokens != length:
        raise InvalidArgument(
            f"prompt_embeds has {embeds.num_tokens} positions and prompt_token_ids {length}; they must be as many",
            field="prompt_embeds",
        )
    if embeds.hidden_size != hidden_size:
        raise InvalidArgument(
            f"prompt_embeds has vectors of {embeds.hidden_size} numbers; the model's have {hidden_size}",
            field="prompt_embeds",
        )
    if embeds.is_token and len(embeds.is_token) != length:
        raise InvalidArgument(
            f"prompt_is_token_ids has {len(embeds.is_token)} entries; the prompt has {length} positions",
            field="prompt_is_token_ids",
        )
    if request.sampling_params.prompt_logprobs is not None:
        raise Unimplemented(
            "sampling_params.prompt_logprobs is not served with prompt_embeds: a vector has no probability",
            field="sampling_params.prompt_logprobs",
        )
    if not _finite(embeds):
        raise InvalidArgument("prompt_embeds holds numbers that are infinite or NaN", field="prompt_embeds")


def _finite(embeds: PromptEmbeds) -> bool:
    if embeds.dtype == "bfloat16":
        bits = np.frombuffer(embeds.data, dtype="<u2")
        return not bool(((bits & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any())
    return bool(np.isfinite(np.frombuffer(embeds.data, dtype="<f4" if embeds.dtype == "float32" else "<f2")).all())
