"""Tries out what following a compiled grammar costs, before any request does."""

import random

import numpy as np
import xgrammar

from penstock_enginecore.structured_output.core.base import bitmask_words
from penstock_enginecore.structured_output.cost import accept_cost, fill_cost
from penstock_enginecore.structured_output.grammar import XgrammarGrammar

_TOKENS = 48
_WALKS = 2


def costs_too_much(compiled: xgrammar.CompiledGrammar, budget: float) -> bool:
    """Whether one of the first tokens of an output takes more than ``budget`` seconds of CPU time. It walks twice: once with the
    same token as long as that is allowed, which is what grammars that can be read in many ways are worst at, once at random.
    """
    return any(_walk(compiled, budget, sticky=walk == 0) for walk in range(_WALKS))


def _walk(compiled: xgrammar.CompiledGrammar, budget: float, *, sticky: bool) -> bool:
    vocab_size = compiled.tokenizer_info.vocab_size
    grammar, row = XgrammarGrammar(compiled, vocab_size), np.zeros(bitmask_words(vocab_size), np.int32)
    rng, token = random.Random(0), -1
    for _ in range(_TOKENS):
        seconds = accept_cost(grammar, token, budget) or 0.0 if token >= 0 else 0.0
        if grammar.terminated:
            return False
        if seconds + fill_cost(grammar, row, budget - seconds) > budget:
            return True
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return False
        if not sticky or token not in allowed:
            token = int(allowed[0] if sticky else rng.choice(allowed))
    return False
