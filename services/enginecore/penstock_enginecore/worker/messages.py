"""What the engine tells its workers, and what they answer: msgpack, a message of a ring each. Nothing is pickled.

All workers get the same calls in the same order, and answer each one that has a number, in that order. A step is two messages:
``Execute``, which is answered with ``Sample``, and ``Sample``.

Messages hold the structs that the engine and its workers use. No struct is copied field by field into a message, because such a
copy loses the fields that are added to the struct later.
"""

import hashlib
import time
from typing import Any, Literal, get_origin

import msgspec
import numpy as np

from penstock_common.config.checks import check_range
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest
from penstock_enginecore.worker.failures import Failure

# What a worker is told when it is made.


class Node(msgspec.Struct, frozen=True):
    """One of the hosts of an engine's workers: those from ``first_rank`` on. ``meeting``: host:port at which workers of all nodes
    find each other. ``address``: the IP address at which others reach those of this one.
    """

    first_rank: int
    num_workers: int
    meeting: str
    address: str


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``engine``: the same for all workers of an engine. ``rank``: which of ``world_size`` workers this one is: those of a stage
    come one after the other, the stages behind one another. ``node``: where it runs, None for an engine that has one node. Of
    workers on one node each has a device of its own, the one of its place, and its share of the cores. ``store``: a descriptor
    of memory that the workers of the node share, where they find each other; None for a worker that is alone. ``exchange``: a
    descriptor of the memory in which the workers of a stage exchange what they computed; None where that goes over gloo.
    """

    engine: EngineCoreConfig
    rank: int = 0
    world_size: int = 1
    node: Node | None = None
    store: int | None = None
    exchange: int | None = None

    def __post_init__(self) -> None:
        check_range("worker.world_size", self.world_size, low=1)
        check_range("worker.rank", self.rank, low=0, high=self.world_size - 1)

    @property
    def place(self) -> int:
        """Which of the node's workers this one is."""
        return self.rank - self.node.first_rank if self.node else self.rank

    @property
    def num_neighbours(self) -> int:
        """Workers of the node, this one among them."""
        return self.node.num_workers if self.node else self.world_size

    @property
    def stage(self) -> int:
        """Which stage of the pipeline the worker belongs to."""
        return self.rank // self.engine.executor.tensor_parallel_size

    @property
    def tensor_rank(self) -> int:
        """Which part of its stage's layers the worker has."""
        return self.rank % self.engine.executor.tensor_parallel_size

    @property
    def samples(self) -> bool:
        """Whether the worker is of the last stage."""
        return self.stage == self.engine.executor.pipeline_parallel_size - 1

    @property
    def tells_tokens(self) -> bool:
        """Whether the engine gets its tokens from this worker, the first of the last stage."""
        return self.samples and self.tensor_rank == 0


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


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    """The forward pass of a step. ``sent``: monotonic seconds, by the clock that processes of one machine share."""

    step: SchedulerOutput
    sent: float


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """The tokens of the step before it."""

    number: int
    grammar: GrammarBitmask | None = None


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


def _to_builtins(value: Any) -> Any:
    """Encode a numpy array as its dtype, its shape and its bytes, which are written from its own memory."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    raise TypeError(f"a message between engine and worker cannot hold a {type(value).__name__}")


def _from_builtins(kind: Any, value: Any) -> Any:
    """Decode a numpy array, which may be written to."""
    if get_origin(kind) is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    raise TypeError(f"a message between engine and worker cannot hold a {kind}")


encode = msgspec.msgpack.Encoder(enc_hook=_to_builtins).encode
decode_call = msgspec.msgpack.Decoder(Call, dec_hook=_from_builtins).decode
decode_answer = msgspec.msgpack.Decoder(Answer, dec_hook=_from_builtins).decode


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


def digest_of(output: ModelRunnerOutput) -> bytes:
    """A hash of a step's tokens and whose they are, and of what could not be encoded: workers that differ in that have other
    embeddings.
    """
    told = encode((output.request_ids, output.sampled_token_ids, sorted(output.encoder_failures)))
    return hashlib.blake2b(told, digest_size=_DIGEST_BYTES).digest()
