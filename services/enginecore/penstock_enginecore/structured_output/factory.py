"""Backends of constrained decoding by name."""

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.structured_output.base import GrammarBackend
from penstock_enginecore.structured_output.backend import XgrammarBackend

_BACKENDS = {"xgrammar": XgrammarBackend}


def make_grammar_backend(config: EngineCoreConfig, *, vocab_size: int, eos_token_ids: frozenset[int]) -> GrammarBackend:
    """The backend that ``structured_output.backend`` names, for a model with ``vocab_size`` tokens. Starts nothing."""
    backend = _BACKENDS[config.structured_output.backend]
    return backend(config.structured_output, config.model, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
