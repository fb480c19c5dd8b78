"""Code of the process that compiles constraints and measures the CPU time of their masks. The engine's process does not
run this module.
"""

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
    """Return whether the grammar takes more than ``budget`` seconds of CPU time for one of the first tokens of an
    output.

    The function generates two outputs as a trial. The first output repeats the same token as long as the grammar allows
    the token, which is the worst case for ambiguous grammars. The second output has random tokens.
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
    """Message from the compiling process to the engine.

    Attributes:
        kind: "taken" means that the process has received the job. If the process ends after this message, the job is
            the cause. "memory" means that the job took too much memory. "costly" means that the mask of one token takes
            too much CPU time.
        text: The compiled, serialized grammar, or the reason why the compilation failed.
    """

    kind: Literal["ready", "taken", "compiled", "refused", "memory", "costly"]
    text: str = ""


class Job(msgspec.Struct, frozen=True):
    """A constraint to compile.

    Attributes:
        max_bytes: Maximum size of the constraint's text.
        token_budget: CPU time that one token may take, in seconds.
    """

    constraint: StructuredOutput
    max_bytes: int
    token_budget: float


Compile = Callable[[xgrammar.GrammarCompiler, Job], xgrammar.CompiledGrammar]


def main(connection: "Connection[Any, Any]", info: xgrammar.TokenizerInfo, memory: int) -> None:
    """Send "ready", then answer each Job with a Reply until ``connection`` is closed.

    ``memory`` is the limit in bytes, in addition to the memory in use before the first Job.
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
            # End the process after an out-of-memory error, because its heap may be too fragmented for later jobs.
            return


def answer(compiler: xgrammar.GrammarCompiler, job: Job) -> Reply:
    """Compile the constraint of one job, and return the reply."""
    try:
        compiled = compile_constraint(compiler, job)
        if costs_too_much(compiled, job.token_budget):
            return Reply("costly")
        return Reply("compiled", compiled.serialize_json())
    except InvalidArgument as e:
        return Reply("refused", e.message)
    except Exception as e:  # These are xgrammar's own errors, and errors that xgrammar does not catch.
        if out_of_memory(e):
            return Reply("memory")
        kind, _ = job.constraint.constraint
        return Reply("refused", f"{FIELD}.{kind} cannot be compiled: {_reason(str(e))}")


def compile_constraint(compiler: xgrammar.GrammarCompiler, job: Job) -> xgrammar.CompiledGrammar:
    """Translate a constraint into a grammar and compile the grammar. Raises InvalidArgument if the constraint is
    refused, and RuntimeError if xgrammar cannot parse the grammar.
    """
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
        raise InvalidArgument(f"{FIELD}.{kind} allows no output that this model can generate", field=f"{FIELD}.{kind}")
    return compiled


def _reason(text: str) -> str:
    """Return the message of an xgrammar error, without the time, the file name and the failed check at the start of the
    message.
    """
    message = text.strip().split("\n", 1)[0]
    return re.sub(r"^(\[[0-9:]+\] )?(\S+\.(cc|h):\d+: )?(Check failed: .* is false: )?", "", message)
