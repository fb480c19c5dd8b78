"""Backends of constrained decoding by name."""

import importlib
from collections.abc import Callable

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.structured_output.core.base import GrammarBackend
from penstock_enginecore.structured_output.grammar_processes import Children

_BACKENDS = {"xgrammar": "penstock_enginecore.structured_output.backend:XgrammarBackend"}


def make_grammar_backend(
    config: EngineCoreConfig, *, vocab_size: int, eos_token_ids: frozenset[int], children: Children | None = None
) -> GrammarBackend:
    """Create the backend ``structured_output.backend``, for a model with ``vocab_size`` tokens. Starts nothing.

    ``children`` may have been started early. The backend's module is imported here, because it needs torch, and the
    engine's port answers before torch is imported.
    """
    module, _, name = _BACKENDS[config.structured_output.backend].partition(":")
    backend: Callable[..., GrammarBackend] = getattr(importlib.import_module(module), name)
    return backend(
        config.structured_output,
        config.model,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        children=children,
        forced=config.speculative.enabled,
    )
