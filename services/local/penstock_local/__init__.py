"""The ``penstock`` command, which runs the three services and a terminal client, and ``LLM`` for Python programs.

``from penstock_local import LLM, SamplingParams`` runs a model inside a Python program. The first use of a name imports
its module, and torch with it. So the command itself starts fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_common.types.outputs import RequestError
    from penstock_common.types.sampling import JsonWhitespace, OutputKind
    from penstock_local.llm.batch import Interrupted
    from penstock_local.llm.beam_search import BeamSearchParams
    from penstock_local.llm.llm import LLM
    from penstock_local.llm.llm_engine import AsyncLLMEngine, LLMEngine
    from penstock_local.llm.outputs import (
        Beam,
        BeamSearchOutput,
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        FinishReason,
        PoolingOutput,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
    )
    from penstock_local.llm.parameters import SamplingParams, StructuredOutput

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "Beam",
    "BeamSearchOutput",
    "BeamSearchParams",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "FinishReason",
    "Interrupted",
    "JsonWhitespace",
    "LLMEngine",
    "OutputKind",
    "PoolingOutput",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "StructuredOutput",
]

_HOMES = {
    "penstock_common.types.outputs": ("RequestError",),
    "penstock_common.types.sampling": ("JsonWhitespace", "OutputKind"),
    "penstock_local.llm.batch": ("Interrupted",),
    "penstock_local.llm.beam_search": ("BeamSearchParams",),
    "penstock_local.llm.llm": ("LLM",),
    "penstock_local.llm.llm_engine": ("AsyncLLMEngine", "LLMEngine"),
    "penstock_local.llm.outputs": (
        "Beam",
        "BeamSearchOutput",
        "ClassificationOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "FinishReason",
        "PoolingOutput",
        "RequestMetrics",
        "RequestOutput",
        "ScoringOutput",
    ),
    "penstock_local.llm.parameters": ("SamplingParams", "StructuredOutput"),
}


def __getattr__(name: str) -> Any:
    """Import one of the names of ``__all__``. For a name of vLLM, raise ImportError with the equivalent name."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        if hint := _replacement(name):
            # ``from ... import`` would replace the text of an AttributeError, so raise ImportError.
            raise ImportError(f"cannot import name {name!r} from {__name__!r}{hint}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def _replacement(name: str) -> str:
    if name.startswith("_"):  # Python itself looks up such names at every start of the command.
        return ""
    from penstock_local.llm import parameters

    return parameters.replacement(name, parameters.TYPES)


def __dir__() -> list[str]:
    """Return the public names, for tab completion."""
    return sorted(__all__)
