"""The architectures that parity tests run, as parameters of pytest."""

import os
import zlib
from typing import Any

import pytest

from tests.fakes.models.tiny_models import ARCHITECTURES, RECURRENT_ARCHITECTURES

KINDS = (
    "deepseek_v3",  # latent keys and values
    "gemma2",  # capped scores
    "gemma3",  # window layers and full-attention layers
    "gemma4_shared",  # layers that share keys and values, embeddings in each layer
    "gpt2",  # learned positions
    "gpt_bigcode",  # one key head
    "gpt_oss",  # sinks
    "llama",
    "llama4_text",  # chunks of attention, layers without positions
    "mistral",  # only window layers
    "mixtral",  # experts
    "phi",  # rotary positions in a part of each head, attention parallel to the MLP
    "qwen2",  # biases
    "qwen3",  # norms of queries and keys
)
"""One architecture for each kind of layer, for tests of a single kind of computation."""
QUICK_ARCHITECTURES = tuple(
    name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES
)
"""All architectures. One of each kind runs in ``make test``, the others in ``make test-slow``."""

RECURRENT_KINDS = (
    "granitemoehybrid",  # Mamba-2 beside attention, experts
    "granitemoehybrid_dense",  # factors of inputs, residual additions and logits
    "jamba",  # Mamba-1 beside attention, experts
    "kimi_linear",  # delta rule with a decay per row of the state, latent keys and values
    "lfm2",  # short convolutions
    "mamba2",  # no attention
    "qwen3_5",  # gated delta rule
)
"""One architecture of each kind of recurrent layer."""


def _quick(names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(name if name in RECURRENT_KINDS else pytest.param(name, marks=pytest.mark.slow) for name in names)


QUICK_RECURRENT = _quick(RECURRENT_ARCHITECTURES)
"""All architectures with recurrent layers. One of each kind runs in ``make test``, the others in ``make test-slow``."""
_FULL = os.environ.get("PENSTOCK_RECURRENT") == "full"
RECURRENT_CASES = QUICK_RECURRENT if _FULL else RECURRENT_KINDS
"""Architectures for tests in which layers of one kind do the same: one of each kind, or all of them with
``PENSTOCK_RECURRENT=full``.
"""
EVICTED_RECURRENT = _quick(
    tuple(
        name
        for name in (RECURRENT_ARCHITECTURES if _FULL else RECURRENT_KINDS)
        if name not in ("falcon_mamba", "mamba")
    )
)
"""Those whose states can be evicted in small tests. The rows of the others need so much memory that all states fit."""


def skip_most_of_others(request: pytest.FixtureRequest, fixture: str) -> None:
    """Skip four of five parameters of a test for architectures outside ``RECURRENT_KINDS``, which the fixture's parameter
    names. ``PENSTOCK_RECURRENT=full`` runs all of them.
    """
    callspec = getattr(request.node, "callspec", None)
    values = {} if callspec is None else dict(callspec.params)
    architecture = values.pop(fixture, None)
    if not values or architecture in RECURRENT_KINDS or _FULL:
        return
    if zlib.crc32(f"{architecture} {sorted(values.items())}".encode()) % 5:
        pytest.skip("PENSTOCK_RECURRENT=full runs all parameters of each architecture")
