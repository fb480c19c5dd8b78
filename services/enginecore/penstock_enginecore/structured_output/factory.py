"""Factory that creates the backend of constrained decoding from its name in the configuration."""

import importlib
from collections.abc import Callable

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.structured_output.core.base import GrammarBackend
from penstock_enginecore.structured_output.grammar_processes import Children

_BACKENDS = {"xgrammar": "penstock_enginecore.structured_output.backend:XgrammarBackend"}


def make_grammar_backend(
    config: EngineCoreConfig, *, vocab_size: int, eos_token_ids: frozenset[int], children: Children | None = None
) -> GrammarBackend:
    """Create the backend that the setting ``structured_output.backend`` names, for a model with ``vocab_size`` tokens.
    The function starts no process.

    ``children`` starts the backend's processes, and may already have started the fork server. This function imports the
    backend's module, because the module needs torch, and the engine must answer on its port before torch is imported.
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
