"""What the engine tells its workers, and what they answer: msgpack, a message of a ring each. Nothing is pickled.

All workers get the same calls in the same order, and answer each one that has a number, in that order. A step is two messages:
``Execute``, which is answered with ``Sample``, and ``Sample``.
"""

import hashlib
import time
from typing import Literal

import msgspec
import numpy as np

from penstock_enginecore.core.lora.request import LoadedLora, LoraRequest
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.executor.multiproc.failures import Failure
from penstock_enginecore.executor.worker_config import WorkerConfig

Method = Literal[
    "load_model",
    "kv_cache_specs",
    "available_kv_cache_memory",
    "initialize_kv_cache",
    "recover",
    "execute_dummy_batch",
    "draft",
    "step_seconds",
    "block_facts",
    "collective_rpc",
    "shutdown",
]
_DIGEST_BYTES = 8


class Start(msgspec.Struct, frozen=True):
    """What a worker reads first. Descriptors that it has inherited: ``calls``, the ring that it reads, and ``answers``, the one
    that it writes; ``engine``, a pipe that is closed when the engine has ended; ``stacks``, a pipe for where its threads are.
    """

    config: WorkerConfig
    calls: int
    answers: int
    engine: int
    stacks: int


class Mask(msgspec.Struct, frozen=True, array_like=True):
    """A GrammarBitmask: ``words`` int32 a row."""

    request_ids: list[str]
    words: int
    rows: bytes


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    """The forward pass of a step. ``sent``: monotonic seconds, by the clock that processes of one machine share."""

    step: SchedulerOutput
    sent: float


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """The tokens of the step before it."""

    number: int
    grammar: Mask | None = None


class Invoke(msgspec.Struct, frozen=True, tag="invoke"):
    """A method of the worker, by name. ``argument``: what it takes, msgpack; empty for nothing."""

    number: int
    method: Method
    argument: bytes = b""


class LoadLora(msgspec.Struct, frozen=True, tag="load_lora"):
    """Read an adapter while steps go on. Numbers are those of loads, which are answered when they are done."""

    number: int
    lora: LoraRequest


class UnloadLora(msgspec.Struct, frozen=True, tag="unload_lora"):
    """Let go of an adapter. There is no answer."""

    digest: bytes


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy_blocks"):
    """Call a method of ``WorkerCopies`` behind the steps before, or at once (``read``), while steps go on. ``arguments``:
    msgpack, a list. Numbers are those of copies, which are answered when they are done.
    """

    number: int
    method: str
    arguments: bytes


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A line for the operator, while something slow goes on."""

    text: str


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """What a method returned, msgpack."""

    number: int
    value: bytes


class Sampled(msgspec.Struct, frozen=True, tag="sampled"):
    """The end of a step. ``digest``: of its tokens, empty from a stage that does not sample. One worker sends them, the others of
    its stage the digest alone.
    """

    number: int
    digest: bytes
    output: ModelRunnerOutput | None = None


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """A call that failed."""

    number: int
    failure: Failure


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """An adapter that was read and taken, or why it was not."""

    number: int
    outcome: LoadedLora | Failure


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """A copy that is over: what it gave, msgpack, or why it failed."""

    number: int
    outcome: bytes | Failure


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """What the worker says of itself, now and then."""

    stats: WorkerStats


Call = Execute | Sample | Invoke | LoadLora | UnloadLora | CopyBlocks
Answer = Progress | Returned | Sampled | Raised | Loaded | Copied | Stats

encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def execute(step: SchedulerOutput) -> Execute:
    """The message for a step. What the engine has found out about its vectors stays with the engine."""
    if step.new_requests and any(new.prompt_embeds is not None for new in step.new_requests):
        step = msgspec.structs.replace(
            step,
            new_requests=[
                new
                if new.prompt_embeds is None
                else msgspec.structs.replace(new, prompt_embeds=msgspec.structs.replace(new.prompt_embeds, memo={}))
                for new in step.new_requests
            ],
        )
    return Execute(step, time.monotonic())


def mask_of(grammar: GrammarBitmask | None) -> Mask | None:
    """The message's form of a bitmask."""
    if grammar is None:
        return None
    rows = np.ascontiguousarray(grammar.bitmask)
    return Mask(grammar.request_ids, rows.shape[1], rows.tobytes())


def bitmask_of(mask: Mask | None) -> GrammarBitmask | None:
    """The bitmask that ``mask_of`` was given."""
    if mask is None:
        return None
    rows = np.frombuffer(bytearray(mask.rows), dtype=np.int32).reshape(len(mask.request_ids), mask.words)
    return GrammarBitmask(mask.request_ids, rows)


def digest_of(output: ModelRunnerOutput) -> bytes:
    """A hash of a step's tokens and whose they are, and of what could not be encoded: workers that differ in that have other
    embeddings.
    """
    told = encode((output.request_ids, output.sampled_token_ids, sorted(output.encoder_failures)))
    return hashlib.blake2b(told, digest_size=_DIGEST_BYTES).digest()
