"""The architectures that parity tests run, as parameters of pytest."""

import pytest

from tests.fakes.models.tiny_models import ARCHITECTURES

KINDS = (
    "deepseek_v3",  # keys and values in a latent
    "gemma2",  # scores that are capped
    "gemma3",  # windows beside full attention
    "gpt2",  # learned positions
    "gpt_bigcode",  # one key head
    "gpt_oss",  # sinks
    "llama",
    "llama4_text",  # chunks of attention, layers without positions
    "mistral",  # windows alone
    "mixtral",  # experts
    "phi",  # positions in a part of a head, attention beside the MLP
    "qwen2",  # biases
    "qwen3",  # norms of queries and keys
)
"""One architecture of each kind of layer, for tests of one way of computing at a time."""
QUICK_ARCHITECTURES = tuple(
    name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES
)
"""All architectures. One of each kind runs in ``make test``, the others in ``make test-slow``."""
