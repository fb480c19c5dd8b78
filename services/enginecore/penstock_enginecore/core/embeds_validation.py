"""Validation of prompt embeddings. Pure checks, safe on any thread."""

import math

import numpy as np

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.octets import Octets
from penstock_common.types.prompt_embeds import EmbedsDtype, PromptEmbeds
from penstock_common.types.request import EngineCoreRequest

_TOO_LARGE = {"float16": 65520.0, "bfloat16": float(np.uint32(0x7F7F8000).view(np.float32)), "float32": math.inf}
"""Smallest float32 number that becomes infinite when rounded to the model's dtype, by dtype."""
_TOO_LARGE_BFLOAT16 = {"float16": 0x4780, "bfloat16": 0x7F80, "float32": 0x7F80}
"""Smallest bfloat16 number that becomes infinite in the model's dtype, by dtype, as a bit pattern without the sign bit.
The bit pattern of NaN, read as an integer, is larger.
"""

_FINITE = "finite"
"""Prefix of the key in ``embeds.memo`` under which the result of ``are_finite`` is cached."""


def check_prompt_embeds(request: EngineCoreRequest, embeds: PromptEmbeds, hidden_size: int, dtype: str) -> None:
    """Raise an error unless the engine can use ``embeds`` as the prompt.

    Args:
        request: The request.
        embeds: The request's prompt embeddings.
        hidden_size: Length of one embedding of the model. 0 if the engine accepts no prompt embeddings.
        dtype: The model's dtype. The engine converts the embeddings to this dtype.

    Raises:
        InvalidArgument: The embeddings are invalid. The error names the field.
        Unimplemented: The request uses a feature that does not work with embeddings.
    """
    if request.pooling_params is not None:
        raise Unimplemented("prompt_embeds is not supported by pooling engines", field="prompt_embeds")
    if hidden_size == 0:
        raise Unimplemented(
            "prompt_embeds is not supported: the layers of the served model also read the token ids of the prompt; send "
            "the prompt as token ids or text",
            field="prompt_embeds",
        )
    length = len(request.prompt_token_ids)
    if embeds.num_tokens != length:
        raise InvalidArgument(
            f"prompt_embeds has {embeds.num_tokens} embeddings, but prompt_token_ids has {length} tokens; the numbers must "
            "be equal",
            field="prompt_embeds",
        )
    if embeds.hidden_size != hidden_size:
        raise InvalidArgument(
            f"prompt_embeds has embeddings of length {embeds.hidden_size}; the model's embeddings have length {hidden_size}",
            field="prompt_embeds",
        )
    if request.sampling_params.prompt_logprobs is not None:
        raise Unimplemented(
            "sampling_params.prompt_logprobs is not supported with prompt_embeds: only tokens have a probability",
            field="sampling_params.prompt_logprobs",
        )
    name = f"{_FINITE} as {dtype}"
    if (finite := embeds.memo.get(name)) is None:
        finite = embeds.memo[name] = are_finite(embeds.data, embeds.dtype, dtype)
    if not finite:
        raise InvalidArgument(
            f"prompt_embeds has numbers that are infinite or NaN in {dtype}, the model's dtype",
            field="prompt_embeds",
        )


def are_finite(data: Octets, stored: EmbedsDtype, dtype: str) -> bool:
    """Return whether all numbers in ``data``, of type ``stored``, are finite after rounding to ``dtype``."""
    if stored == "bfloat16":
        bits = np.frombuffer(data, dtype="<u2")
        return bool((bits & 0x7FFF).max() < _TOO_LARGE_BFLOAT16[dtype])
    numbers = np.frombuffer(data, dtype="<f4" if stored == "float32" else "<f2")
    too_large = _TOO_LARGE[dtype]
    # Comparisons with NaN are false, so NaN counts as not finite.
    return -too_large < float(numbers.min()) and float(numbers.max()) < too_large
