"""Messages between the engine and its workers, encoded with msgpack and sent over rings. No message is pickled.

All workers get the same calls in the same order. A worker answers each call that has a number, in the order of the
calls. The engine sends two messages for a step: ``Execute``, which workers do not answer, and ``Sample``.

Messages contain the engine's own structs. If structs were copied field by field into messages, fields that are added
later could be forgotten.
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

# Configuration of a worker process.


class Node(msgspec.Struct, frozen=True):
    """One of several hosts that run workers of an engine.

    Attributes:
        first_rank: Rank of the host's first worker.
        num_workers: Number of workers on the host.
        meeting: host:port of the store through which the workers of all nodes find each other.
        address: IP address at which other nodes reach the workers of this node.
    """

    first_rank: int
    num_workers: int
    meeting: str
    address: str


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one worker.

    Each worker on a node uses a separate device, selected by the worker's index on the node. The node's cores are
    divided equally among the workers.

    Attributes:
        engine: Settings of the engine, the same for all workers.
        rank: Rank of this worker, from 0 to ``world_size - 1``. Workers of one pipeline stage have consecutive ranks.
        world_size: Number of workers of the engine.
        node: The worker's host, or None if the engine has one node.
        store: File descriptor of shared memory in which the node's workers find each other, or None for a single
            worker.
        exchange: File descriptor of the shared memory in which the workers of a pipeline stage exchange results, or
            None if they use gloo.
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
        """Index of the worker on its node."""
        return self.rank - self.node.first_rank if self.node else self.rank

    @property
    def num_neighbours(self) -> int:
        """Number of workers on the node, including this worker."""
        return self.node.num_workers if self.node else self.world_size

    @property
    def stage(self) -> int:
        """Index of the worker's pipeline stage."""
        return self.rank // self.engine.executor.tensor_parallel_size

    @property
    def tensor_rank(self) -> int:
        """Tensor-parallel rank of the worker: the index of its part of each layer of its stage."""
        return self.rank % self.engine.executor.tensor_parallel_size

    @property
    def samples(self) -> bool:
        """Whether the worker belongs to the last pipeline stage, whose workers sample tokens."""
        return self.stage == self.engine.executor.pipeline_parallel_size - 1

    @property
    def tells_tokens(self) -> bool:
        """Whether this worker sends sampled tokens to the engine. Only the first worker of the last stage sends tokens."""
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
    "state_facts",
    "collective_rpc",
    "shutdown",
]
_DIGEST_BYTES = 8


class Start(msgspec.Struct, frozen=True):
    """First message that a worker reads, with the numbers of the file descriptors that the worker inherits.

    Attributes:
        config: Configuration of the worker.
        calls: Descriptor of the ring from which the worker reads calls.
        answers: Descriptor of the ring to which the worker writes answers.
        engine: Descriptor of a pipe that is closed when the engine process ends.
        stacks: Descriptor of a pipe to which the worker writes stack traces of its threads.
    """

    config: WorkerConfig
    calls: int
    answers: int
    engine: int
    stacks: int


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    """Call that starts the forward pass of a step. ``sent`` is the time at which the engine sent the call, on the
    monotonic clock that all processes of a machine share.
    """

    step: SchedulerOutput
    sent: float


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Call that samples the tokens of the step that the preceding ``Execute`` started."""

    number: int
    grammar: GrammarBitmask | None = None


class Invoke(msgspec.Struct, frozen=True, tag="invoke"):
    """Call of a method of the worker by name. ``argument`` is the argument encoded with msgpack, or empty if the method
    has no argument.
    """

    number: int
    method: Method
    argument: bytes = b""


class LoadLora(msgspec.Struct, frozen=True, tag="load_lora"):
    """Call that loads a LoRA adapter while steps run. ``LoadLora`` calls have their own sequence of numbers, and a
    worker answers such a call when the load is complete.
    """

    number: int
    lora: LoraRequest


class UnloadLora(msgspec.Struct, frozen=True, tag="unload_lora"):
    """Call that unloads a LoRA adapter. Workers do not answer this call."""

    digest: bytes


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy_blocks"):
    """Call of a method of ``WorkerCopies``, which runs after the preceding steps. Only the method ``read`` runs
    immediately, while steps run.

    ``CopyBlocks`` calls have their own sequence of numbers, and a worker answers such a call when the copy is complete.
    ``arguments`` is a list encoded with msgpack. If ``of_states`` is true, states of recurrent layers are copied
    instead of KV blocks.
    """

    number: int
    of_states: bool
    method: str
    arguments: bytes


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Message about the progress of a slow operation, for the engine's log."""

    text: str


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """Answer to ``Invoke``: the result of the method, encoded with msgpack."""

    number: int
    value: bytes


class Sampled(msgspec.Struct, frozen=True, tag="sampled"):
    """Answer to ``Sample``, after which the step is complete. One worker of the last stage sends the tokens, and the
    other workers of this stage send only the digest.

    Attributes:
        number: Number of the call that is answered.
        digest: Hash of the step's tokens, or empty if the worker's stage does not sample.
        output: Results of the step, or None if another worker sends the results.
        num_nans: For each request ID, how many NaN or infinite numbers this worker has found in logits or recurrent
            states. A worker knows only the states of its own layers and heads.
    """

    number: int
    digest: bytes
    output: ModelRunnerOutput | None = None
    num_nans: dict[str, int] = {}


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """Answer to a call that has failed."""

    number: int
    failure: Failure


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Answer to ``LoadLora``: the loaded adapter, or the error."""

    number: int
    outcome: LoadedLora | Failure


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """Answer to ``CopyBlocks``: the result encoded with msgpack, or the error."""

    number: int
    outcome: bytes | Failure


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Statistics of a worker, which the worker sends from time to time without a call."""

    stats: WorkerStats


Call = Execute | Sample | Invoke | LoadLora | UnloadLora | CopyBlocks
Answer = Progress | Returned | Sampled | Raised | Loaded | Copied | Stats


def _to_builtins(value: Any) -> Any:
    """Encode a numpy array as dtype, shape and bytes. The encoder reads the bytes from the array's own memory, without
    a copy.
    """
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    raise TypeError(f"a message between engine and worker cannot contain a {type(value).__name__}")


def _from_builtins(kind: Any, value: Any) -> Any:
    """Decode a numpy array. The returned array is writable."""
    if get_origin(kind) is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    raise TypeError(f"a message between engine and worker cannot contain a {kind}")


encode = msgspec.msgpack.Encoder(enc_hook=_to_builtins).encode
decode_call = msgspec.msgpack.Decoder(Call, dec_hook=_from_builtins).decode
decode_answer = msgspec.msgpack.Decoder(Answer, dec_hook=_from_builtins).decode


def execute(step: SchedulerOutput) -> Execute:
    """Return the ``Execute`` message for a step. Cached results of checks of prompt embeddings are left out."""
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
    """Return a hash of a step's tokens, their request IDs, and the IDs of media that could not be encoded.

    If the IDs of media differ between workers, the workers have different media embeddings.
    """
    told = encode((output.request_ids, output.sampled_token_ids, sorted(output.encoder_failures)))
    return hashlib.blake2b(told, digest_size=_DIGEST_BYTES).digest()
