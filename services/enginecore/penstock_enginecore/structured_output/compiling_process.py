"""The process that compiles constraints, and measures what following them costs. Nothing here runs in the engine."""

import random
import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec
import numpy as np
import xgrammar

from penstock_common.errors import InvalidArgument
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.structured_output.constraints.source import FIELD, grammar_source
from penstock_enginecore.structured_output.core.base import bitmask_words
from penstock_enginecore.structured_output.grammar_processes import NICENESS, detach, limit_memory, out_of_memory
from penstock_enginecore.structured_output.matcher import XgrammarGrammar, accept_cost, fill_cost

_TRIAL_TOKENS = 48
_TRIAL_WALKS = 2


def costs_too_much(compiled: xgrammar.CompiledGrammar, budget: float) -> bool:
    """Whether one of the first tokens of an output takes more than ``budget`` seconds of CPU time. It walks twice: once with the
    same token as long as that is allowed, which is what grammars that can be read in many ways are worst at, once at random.
    """
    return any(_walk(compiled, budget, sticky=walk == 0) for walk in range(_TRIAL_WALKS))


def _walk(compiled: xgrammar.CompiledGrammar, budget: float, *, sticky: bool) -> bool:
    vocab_size = compiled.tokenizer_info.vocab_size
    grammar, row = XgrammarGrammar(compiled, vocab_size), np.zeros(bitmask_words(vocab_size), np.int32)
    rng, token = random.Random(0), -1
    for _ in range(_TRIAL_TOKENS):
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


class Reply(msgspec.Struct, frozen=True):
    """``taken``: the job is here, and what ends the process from now on is its fault. ``text``: the compiled grammar, serialized,
    or why there is none. ``memory``: it took more than its share. ``costly``: a token of it does.
    """

    kind: Literal["ready", "taken", "compiled", "refused", "memory", "costly"]
    text: str = ""


class Job(msgspec.Struct, frozen=True):
    """What to compile. ``max_bytes`` bounds the size of the constraint's text, ``token_budget`` what a token may take in seconds
    of CPU time.
    """

    constraint: StructuredOutput
    max_bytes: int
    token_budget: float


Compile = Callable[[xgrammar.GrammarCompiler, Job], xgrammar.CompiledGrammar]


def main(connection: "Connection[Any, Any]", info: xgrammar.TokenizerInfo, memory: int) -> None:
    """Say ready, then take each Job and answer it with a Reply until ``connection`` is closed.

    ``memory`` is in bytes above what is in use when the first Job may come.
    """
    detach(NICENESS)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    compile_constraint(compiler, Job(StructuredOutput(choice=("warm",)), 1024, 1.0))
    limit_memory(memory)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Job)
    connection.send_bytes(encoder.encode(Reply("ready")))
    while True:
        try:
            job = decoder.decode(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(encoder.encode(Reply("taken")))
        reply = answer(compiler, job)
        connection.send_bytes(encoder.encode(reply))
        if reply.kind == "memory":
            return  # what is left of the heap is not worth keeping


def answer(compiler: xgrammar.GrammarCompiler, job: Job) -> Reply:
    """Compile one constraint."""
    try:
        compiled = compile_constraint(compiler, job)
        if costs_too_much(compiled, job.token_budget):
            return Reply("costly")
        return Reply("compiled", compiled.serialize_json())
    except InvalidArgument as e:
        return Reply("refused", e.message)
    except Exception as e:  # xgrammar's own, with the place in its sources in front, and what it lets through
        if out_of_memory(e):
            return Reply("memory")
        kind, _ = job.constraint.constraint
        return Reply("refused", f"{FIELD}.{kind} cannot be compiled: {_reason(str(e))}")


def compile_constraint(compiler: xgrammar.GrammarCompiler, job: Job) -> xgrammar.CompiledGrammar:
    """Translate and compile. Raises InvalidArgument for what is refused, RuntimeError for what xgrammar cannot read."""
    source = grammar_source(job.constraint, job.max_bytes)
    if source.kind == "structural_tag":
        compiled = compiler.compile_structural_tag(source.text)
    else:
        compiled = compiler.compile_grammar(source.text)
    vocab_size = compiled.tokenizer_info.vocab_size
    row = np.zeros(bitmask_words(vocab_size), np.int32)
    XgrammarGrammar(compiled, vocab_size).fill(row)
    if not row.any():
        kind, _ = job.constraint.constraint
        raise InvalidArgument(f"{FIELD}.{kind} allows no output that this model can write", field=f"{FIELD}.{kind}")
    return compiled


def _reason(text: str) -> str:
    """The message of an error of xgrammar's, without the time, the file and the check in front."""
    message = text.strip().split("\n", 1)[0]
    return re.sub(r"^(\[[0-9:]+\] )?(\S+\.(cc|h):\d+: )?(Check failed: .* is false: )?", "", message)
