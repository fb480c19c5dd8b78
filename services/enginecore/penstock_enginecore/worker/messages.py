"""Messages between the engine and its workers, encoded with msgpack, one per ring entry. No message is pickled.

All workers get the same calls in the same order. Workers answer each numbered call, in the order of the calls. A step
consists of two messages: ``Execute``, which is not answered, and ``Sample``.

Messages contain the structs that the engine and its workers use. A copy of a struct field by field would lose fields
that are added to the struct later.
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

# Configuration of a new worker.


class Node(msgspec.Struct, frozen=True):
    """Host that runs workers of an engine.

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
        rank: Number of this worker among ``world_size``. Workers of one pipeline stage have consecutive ranks.
        world_size: Number of workers of the engine.
        node: The worker's host, or None if the engine has one node.
        store: File descriptor of shared memory in which the node's workers find each other, or None for a single
            worker.
        exchange: File descriptor of shared memory for the data exchange within a stage, or None with gloo.
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
        """Number of workers on the node, including this one."""
        return self.node.num_workers if self.node else self.world_size

    @property
    def stage(self) -> int:
        """Index of the worker's pipeline stage."""
        return self.rank // self.engine.executor.tensor_parallel_size

    @property
    def tensor_rank(self) -> int:
        """Index of the worker's part of each layer in its stage."""
        return self.rank % self.engine.executor.tensor_parallel_size

    @property
    def samples(self) -> bool:
        """Whether the worker belongs to the last stage."""
        return self.stage == self.engine.executor.pipeline_parallel_size - 1

    @property
    def tells_tokens(self) -> bool:
        """Whether this worker sends the tokens to the engine. Only the first worker of the last stage does."""
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
    """First message that a worker reads, with the file descriptors that it inherits.

    Attributes:
        config: Configuration of the worker.
        calls: The ring that the worker reads.
        answers: The ring that the worker writes.
        engine: A pipe that is closed when the engine process ends.
        stacks: A pipe for stack traces of the worker's threads.
    """

    config: WorkerConfig
    calls: int
    answers: int
    engine: int
    stacks: int


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    """Starts the forward pass of a step. ``sent`` is in monotonic seconds, on the clock that processes of one machine
    share.
    """

    step: SchedulerOutput
    sent: float


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Samples the tokens of the preceding ``Execute``."""

    number: int
    grammar: GrammarBitmask | None = None


class Invoke(msgspec.Struct, frozen=True, tag="invoke"):
    """Calls a method of the worker by name. ``argument`` is msgpack, or empty if there is none."""

    number: int
    method: Method
    argument: bytes = b""


class LoadLora(msgspec.Struct, frozen=True, tag="load_lora"):
    """Loads an adapter while steps run. Loads have separate numbers, and are answered when they are complete."""

    number: int
    lora: LoraRequest


class UnloadLora(msgspec.Struct, frozen=True, tag="unload_lora"):
    """Unloads an adapter. There is no answer."""

    digest: bytes


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy_blocks"):
    """Calls a method of ``WorkerCopies`` after the preceding steps. ``read`` runs immediately, while steps run.

    Copies have separate numbers, and are answered when they are complete. ``arguments`` is a msgpack list. With
    ``of_states``, states of recurrent layers are copied instead of KV blocks.
    """

    number: int
    of_states: bool
    method: str
    arguments: bytes


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A progress message for the operator during a slow operation."""

    text: str


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The result of a method, as msgpack."""

    number: int
    value: bytes


class Sampled(msgspec.Struct, frozen=True, tag="sampled"):
    """The end of a step. One worker of the last stage sends the tokens, and the other workers of that stage send only
    the digest.

    Attributes:
        number: Number of the call.
        digest: Hash of the step's tokens. Empty from a stage that does not sample.
        output: Results of the step, or None.
        num_nans: By request id, numbers of this worker's logits or states that are not finite. A worker knows only the
            states of its own layers and heads.
    """

    number: int
    digest: bytes
    output: ModelRunnerOutput | None = None
    num_nans: dict[str, int] = {}


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """A failed call."""

    number: int
    failure: Failure


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The result of loading an adapter, or its error."""

    number: int
    outcome: LoadedLora | Failure


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """The end of a copy: its result as msgpack, or its error."""

    number: int
    outcome: bytes | Failure


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Statistics of the worker, which the worker sends at intervals."""

    stats: WorkerStats


Call = Execute | Sample | Invoke | LoadLora | UnloadLora | CopyBlocks
Answer = Progress | Returned | Sampled | Raised | Loaded | Copied | Stats


def _to_builtins(value: Any) -> Any:
    """Encode a numpy array as its dtype, its shape and its bytes. The bytes are written from the array's own memory."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    raise TypeError(f"a message between engine and worker cannot contain a {type(value).__name__}")


def _from_builtins(kind: Any, value: Any) -> Any:
    """Decode a numpy array. The result is writable."""
    if get_origin(kind) is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    raise TypeError(f"a message between engine and worker cannot contain a {kind}")


encode = msgspec.msgpack.Encoder(enc_hook=_to_builtins).encode
decode_call = msgspec.msgpack.Decoder(Call, dec_hook=_from_builtins).decode
decode_answer = msgspec.msgpack.Decoder(Answer, dec_hook=_from_builtins).decode


def execute(step: SchedulerOutput) -> Execute:
    """Build the message for a step. Memoized checks of prompt embeddings are left out."""
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
    """Return a hash of a step's tokens, their request ids, and the ids of media that could not be encoded.

    If the ids of media differ between workers, the workers' embeddings differ.
    """
    told = encode((output.request_ids, output.sampled_token_ids, sorted(output.encoder_failures)))
    return hashlib.blake2b(told, digest_size=_DIGEST_BYTES).digest()
