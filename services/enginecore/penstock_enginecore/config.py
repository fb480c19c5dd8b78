"""Configuration of an engine process.

Every value is validated when the struct is built; unknown keys are refused by ``penstock_common.config.loader``.
Flags and environment names derive from the field names: ``scheduler.max_num_seqs`` is ``--scheduler.max-num-seqs`` and
``PENSTOCK_SCHEDULER__MAX_NUM_SEQS``.
"""

import os
import secrets
from typing import Literal

import msgspec

from penstock_common.config.checks import ByteSize, check_choice, check_range, model_name, require
from penstock_common.config.sections import (
    ClientTlsConfig,
    LogConfig,
    MetricsConfig,
    PeersConfig,
    ServerConfig,
    TracingConfig,
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Task = Literal["auto", "generate", "embed", "classify"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoint to serve and how.

    ``path`` is a directory or a Hugging Face model id. ``dtype`` auto is the checkpoint's own, except that bfloat16
    becomes float32 on a CPU without native support; CPUs compute float16 as float32. ``max_model_len`` None takes the
    model's own limit, lowered to what the KV cache can hold. ``max_logprobs``: how many of the likeliest tokens a request
    may have reported per position, -1 for the whole vocabulary. ``task`` auto follows the checkpoint: causal language
    models generate, those with a classification head classify, encoders and sentence-transformers directories embed.
    """

    path: str
    served_model_name: str = ""
    revision: str = ""
    dtype: Dtype = "auto"
    device: Device = "auto"
    task: Task = "auto"
    max_model_len: int | None = None
    attention_backend: str = "auto"
    trust_remote_code: bool = False
    max_logprobs: int = 20

    def __post_init__(self) -> None:
        require("model.path", self.path)
        check_range("model.max_model_len", self.max_model_len, low=1)
        check_range("model.max_logprobs", self.max_logprobs, low=-1, high=1_000_000)

    @property
    def name(self) -> str:
        """The name clients use."""
        return model_name(self.path, self.served_model_name)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache. ``block_size`` is in tokens, ``kv_cache_memory`` in bytes (``512MiB`` is understood).

    Without ``kv_cache_memory`` the pool takes what ``memory_utilization`` leaves after the model on a GPU, and a quarter
    of the free memory, 4 GiB at most, on a CPU. ``num_blocks`` fixes the pool and is meant for tests.
    ``enable_kv_events``: tell frontends which prefixes have become reusable and which no longer are.
    """

    block_size: int = 16
    kv_cache_memory: ByteSize | None = None
    memory_utilization: float = 0.9
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    enable_kv_events: bool = False

    def __post_init__(self) -> None:
        check_range("cache.block_size", self.block_size, low=1, high=1024)
        check_range("cache.num_blocks", self.num_blocks, low=2)
        check_range("cache.memory_utilization", self.memory_utilization, low=0.05, high=1.0)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a step and of the queue.

    ``max_num_batched_tokens``: tokens per step. ``max_num_seqs``: requests running at once. ``policy`` priority runs requests
    with a lower number first, and takes blocks from those with a higher one. ``fairness``: tenants take turns by their weights,
    each with its requests in the policy's order; under priority among requests of one number. ``async_scheduling`` prepares
    a step while the one before it runs; the tokens are the same.
    ``long_prefill_token_threshold``: at most so many prompt tokens of one request per step, 0 for no limit.
    ``watermark``: fraction of the KV blocks kept free when a waiting request is admitted.
    ``max_waiting_requests`` and ``max_waiting_tokens`` bound the queue; beyond them a request is refused with RESOURCE_EXHAUSTED.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    policy: Literal["fcfs", "priority"] = "fcfs"
    fairness: bool = True
    scheduler: str = "default"
    async_scheduling: bool = False
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    watermark: float = 0.01
    max_waiting_requests: int = 10_000
    max_waiting_tokens: int = 50_000_000

    def __post_init__(self) -> None:
        check_range("scheduler.max_num_batched_tokens", self.max_num_batched_tokens, low=1)
        check_range("scheduler.max_num_seqs", self.max_num_seqs, low=1, high=65_536)
        check_range("scheduler.long_prefill_token_threshold", self.long_prefill_token_threshold, low=0)
        check_range("scheduler.watermark", self.watermark, low=0.0, high=0.5)
        check_range("scheduler.max_waiting_requests", self.max_waiting_requests, low=1)
        check_range("scheduler.max_waiting_tokens", self.max_waiting_tokens, low=1)
        check_choice("scheduler.policy", self.policy, ("fcfs", "priority"))


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kind``: name of the executor, uniproc or one that a plugin registers. ``num_threads``: threads that compute, 0: one
    per core that the process may use, or as many as OMP_NUM_THREADS says. ``max_concurrent_batches``: steps handed to the
    executor at once.
    """

    kind: str = "uniproc"
    num_threads: int = 0
    max_concurrent_batches: int = 1

    def __post_init__(self) -> None:
        require("executor.kind", self.kind)
        check_range("executor.max_concurrent_batches", self.max_concurrent_batches, low=1, high=16)
        check_range("executor.num_threads", self.num_threads, low=0, high=1024)


class KernelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kernels for CPUs. ``isa``: the instruction set, auto for the processor's best, off for torch alone.

    The others turn one use of them off, to find out what is wrong: ``decoder`` computes the layers of known models in one
    call, and attends in it, so it needs ``attention``; ``linear`` the linear layers of all others with packed weights;
    ``attention`` attends over the paged cache as it lies; ``sampler`` finds the likeliest tokens and draws where there are
    no filters.
    """

    isa: Literal["auto", "avx512", "avx2", "baseline", "off"] = "auto"
    decoder: bool = True
    linear: bool = True
    attention: bool = True
    sampler: bool = True

    def __post_init__(self) -> None:
        check_choice("kernels.isa", self.isa, ("auto", "avx512", "avx2", "baseline", "off"))


class StructuredOutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constrained decoding. ``compile_timeout``: seconds of processor time a constraint may take to compile, six times as many by
    the clock. ``compile_memory``: bytes it may take in the compiling process, on top of what that process needs itself.
    ``max_constraint_bytes``: size of a constraint's text. ``cache_size``: how many compiled constraints are kept, of up to some
    16 MB each at 128 000 tokens. ``token_budget``: seconds of processor time that following a constraint may take for one token
    of one request; a step waits a quarter of it at most. ``follow_memory``: bytes that all constraints that are followed may
    take together. ``enable_in_reasoning``: constraints hold from the first token on, also where a model would reason first.
    """

    backend: Literal["xgrammar"] = "xgrammar"
    compile_timeout: float = 10.0
    compile_memory: ByteSize = 1024 * 1024 * 1024
    max_constraint_bytes: ByteSize = 256 * 1024
    cache_size: int = 64
    token_budget: float = 0.02
    follow_memory: ByteSize = 4 * 1024 * 1024 * 1024
    enable_in_reasoning: bool = False

    def __post_init__(self) -> None:
        check_choice("structured_output.backend", self.backend, ("xgrammar",))
        check_range("structured_output.compile_timeout", self.compile_timeout, low=0.1, high=600)
        check_range("structured_output.compile_memory", self.compile_memory, low=64 * 1024 * 1024)
        check_range("structured_output.max_constraint_bytes", self.max_constraint_bytes, low=1, high=16 * 1024 * 1024)
        check_range("structured_output.cache_size", self.cache_size, low=1, high=100_000)
        check_range("structured_output.token_budget", self.token_budget, low=0.001, high=10)
        check_range("structured_output.follow_memory", self.follow_memory, low=256 * 1024 * 1024)


class CoordinatorClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to register. An empty ``address`` runs the engine without a coordinator.

    ``advertise`` is the address frontends reach this engine under; empty: the host's name and the server's port.
    ``stats_interval`` and ``reconnect_max`` are seconds.
    """

    address: str = ""
    advertise: str = ""
    stats_interval: float = 0.1
    reconnect_max: float = 2.0
    tls: ClientTlsConfig = ClientTlsConfig()

    def __post_init__(self) -> None:
        check_range("coordinator.stats_interval", self.stats_interval, low=0.01, high=60)
        check_range("coordinator.reconnect_max", self.reconnect_max, low=0.05, high=300)


class ProfilerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The torch profiler. ``directory`` gets a trace file per profile; empty: profiling is refused."""

    directory: str = ""


class ErrorDumpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept when a step fails. ``directory`` gets a JSON file with the step's scheduler output; empty: the log alone
    has it. ``include_tokens`` adds the token ids, which are what users wrote.
    """

    directory: str = ""
    include_tokens: bool = False


_OWN_NUMBER = secrets.token_hex(4)


class EngineCoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an engine process needs to know. ``engine_id`` names the engine in its cluster, where no two may have the same;
    see ``name``. ``drain_timeout`` is in seconds: how long in-flight requests may go on
    after a stop signal before they end as ABORT. ``wedged_after``: seconds without a finished step, while there is work,
    after which the engine no longer counts as alive: its health says so, coordinator and frontends are told, and what it has
    goes on elsewhere. ``plugins``: names of installed plugins to load (entry points of the group penstock.plugins), all of
    them when unset. ``iteration_log_interval``: seconds between two log lines on what the
    steps did, 0 for none.
    """

    model: ModelConfig
    engine_id: str = ""
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    kernels: KernelsConfig = KernelsConfig()
    structured_output: StructuredOutputConfig = StructuredOutputConfig()
    coordinator: CoordinatorClientConfig = CoordinatorClientConfig()
    server: ServerConfig = ServerConfig(port=50052)
    peers: PeersConfig = PeersConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    profiler: ProfilerConfig = ProfilerConfig()
    error_dump: ErrorDumpConfig = ErrorDumpConfig()
    plugins: tuple[str, ...] | None = None
    iteration_log_interval: float = 10.0
    drain_timeout: float = 30.0
    wedged_after: float = 120.0

    def __post_init__(self) -> None:
        check_range("drain_timeout", self.drain_timeout, low=0.0, high=86_400)
        check_range("iteration_log_interval", self.iteration_log_interval, low=0.0, high=86_400)
        check_range("wedged_after", self.wedged_after, low=1.0, high=86_400)

    @property
    def name(self) -> str:
        """The engine's id: the configured one, else one that no other process has, whatever their hosts are called."""
        return self.engine_id or f"{os.uname().nodename}-{_OWN_NUMBER}"
