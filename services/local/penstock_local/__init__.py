"""The ``penstock`` command: the three services on one machine, and a client in the terminal. And ``LLM``, without either.

``from penstock_local import LLM, SamplingParams`` runs a model inside a Python program. What it needs, torch included, is
imported when one of these names is asked for the first time: the command must start at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_common.types.outputs import FinishReason
    from penstock_common.types.sampling import JsonWhitespace, SamplingParams, StructuredOutput
    from penstock_local.inprocess.llm import LLM
    from penstock_local.inprocess.outputs import CompletionOutput, EmbeddingOutput, RequestOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "FinishReason",
    "JsonWhitespace",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
]

_HOMES = {
    "CompletionOutput": "penstock_local.inprocess.outputs",
    "EmbeddingOutput": "penstock_local.inprocess.outputs",
    "FinishReason": "penstock_common.types.outputs",
    "JsonWhitespace": "penstock_common.types.sampling",
    "LLM": "penstock_local.inprocess.llm",
    "RequestOutput": "penstock_local.inprocess.outputs",
    "SamplingParams": "penstock_common.types.sampling",
    "StructuredOutput": "penstock_common.types.sampling",
}


def __getattr__(name: str) -> Any:
    """Import one of the names of ``__all__``."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
