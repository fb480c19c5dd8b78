"""Configuration of an engine process and of its sessions with frontends, and checks that compare several sections.

Each value is validated when its struct is built. ``penstock_common.config.loader`` refuses unknown keys. Each field has
a description and a range, which also appear in ``--help``, docs/reference/settings.md and the Helm chart. The names of
flags and environment variables derive from the field names. For example, ``scheduler.max_num_seqs`` is
``--scheduler.max-num-seqs`` and ``PENSTOCK_SCHEDULER__MAX_NUM_SEQS``.
"""

import os
import secrets
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from penstock_common.addresses import with_default_port
from penstock_common.config.checks import check_fields
from penstock_common.config.sections import (
    ClientTlsConfig,
    LogConfig,
    MetricsConfig,
    PeersConfig,
    ReconnectMax,
    ServerConfig,
    TracingConfig,
)
from penstock_common.config.setting_dependencies import ABOVE_ONE, OF_ALL, Need, Needs, When, on
from penstock_common.config.settings import REREAD, ByteSize
from penstock_common.errors import ConfigError
from penstock_common.security.shared_secret import check_internal_port
from penstock_common.types.cluster import DEFAULT_POOL
from penstock_enginecore.config.executor import ExecutorConfig, KernelsConfig
from penstock_enginecore.config.kv_cache import CacheConfig, KvTransferConfig
from penstock_enginecore.config.model import LoraConfig, ModelConfig, MultimodalConfig
from penstock_enginecore.config.parallel import DataParallelConfig, ExpertParallelConfig, ParallelConfig
from penstock_enginecore.config.scheduler import SchedulerConfig
from penstock_enginecore.config.speculative import SpeculativeConfig
from penstock_enginecore.config.structured_output import StructuredOutputConfig


class SessionsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the sessions of all frontends together."""

    max_sessions: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description=(
                "Maximum number of open sessions. Each frontend has one session. Further sessions are refused with "
                "RESOURCE_EXHAUSTED."
            ),
        ),
    ] = 256
    max_tensor_bytes: Annotated[
        ByteSize,
        Meta(
            ge=64 * 1024 * 1024,
            description=(
                "Maximum bytes of tensor chunks (media, prompt embeddings) that wait for their requests, over all "
                "sessions. Above the limit, the engine drops a tensor of the session with the most tensor bytes. The "
                "request of that tensor moves to another engine."
            ),
        ),
    ] = 512 * 1024 * 1024

    def __post_init__(self) -> None:
        check_fields("sessions", self)


_MOVES_BLOCKS = When(setting="kv_transfer.transport", values=("auto", "grpc", "shared_memory", "nixl"))
_TENSOR_PARALLEL = When(setting="executor.tensor_parallel_size", off=ABOVE_ONE)
_PIPELINE_PARALLEL = When(setting="executor.pipeline_parallel_size", off=ABOVE_ONE)
_WITH_CHECKPOINT = When(setting="speculative.method", values=("draft_model", "eagle", "eagle3"))
_WITH_LAYERS = When(setting="speculative.method", values=("draft_model", "eagle", "eagle3", "mtp"))
_NGRAM = When(setting="speculative.method", values=("ngram",))
_SUFFIX = When(setting="speculative.method", values=("suffix",))
_GROUPED = When(setting="data_parallel.size", off=ABOVE_ONE)

NEEDS: Needs = (
    *OF_ALL,
    Need(("coordinator.stats_interval", "coordinator.reconnect_max", "coordinator.tls."), (on("coordinator.address"),)),
    Need(("coordinator.advertise",), (on("coordinator.address"), _MOVES_BLOCKS)),
    Need(("peers.",), (on("server.tls.ca"),)),
    Need(("cache.enable_kv_events", "cache.host_memory"), (on("cache.enable_prefix_caching"),)),
    Need(("cache.disk",), (on("cache.host_memory"),)),
    Need(("cache.disk_size",), (on("cache.disk"),)),
    Need(("cache.min_load_tokens",), (on("cache.host_memory"), _MOVES_BLOCKS, on("kv_transfer.connector"))),
    Need(("scheduler.long_prefill_token_threshold",), (on("scheduler.enable_chunked_prefill"),)),
    Need(
        (
            *("scheduler.max_num_encoder_tokens", "multimodal.encoder_cache_size", "multimodal.limit_per_prompt"),
            "multimodal.receiver_cache_bytes",
        ),
        (on("multimodal.enabled"),),
    ),
    Need(("executor.stage_layers",), (_PIPELINE_PARALLEL,)),
    Need(("executor.collectives",), (_TENSOR_PARALLEL,)),
    Need(
        (
            *("executor.nodes.index", "executor.nodes.leader", "executor.nodes.port", "executor.nodes.address"),
            *("executor.nodes.timeout", "executor.nodes.tls."),
        ),
        (When(setting="executor.nodes.size", off=ABOVE_ONE),),
    ),
    Need(("kernels.capture_at_start", "kernels.graph_sizes"), (on("kernels.graphs"),)),
    Need(("kernels.dependent_launch",), (on("kernels.decoder"),)),
    Need(("kernels.graph_sizes",), (on("kernels.capture_at_start"),)),
    Need(("speculative.num_speculative_tokens", "speculative.adaptive"), (on("speculative.method"),)),
    Need(("speculative.model",), (_WITH_CHECKPOINT,)),
    Need(("speculative.draft_sampling",), (_WITH_LAYERS,)),
    Need(("speculative.revision",), (on("speculative.model"),)),
    Need(("speculative.prompt_lookup_min", "speculative.prompt_lookup_max"), (_NGRAM,)),
    Need(
        (
            *("speculative.suffix_decoding_max_tree_depth", "speculative.suffix_decoding_max_spec_factor"),
            *("speculative.suffix_decoding_min_token_prob", "speculative.suffix_decoding_cache_bytes"),
        ),
        (_SUFFIX,),
    ),
    Need(("lora.max_lora_rank", "lora.cpu_memory", "lora.max_wait"), (on("lora.max_loras"),)),
    Need(
        (
            *("data_parallel.on_rank_loss", "data_parallel.move_after", "data_parallel.address"),
            *("data_parallel.connect_timeout", "expert_parallel.enabled", "expert_parallel.prefill_interval"),
        ),
        (_GROUPED,),
    ),
    Need(
        (
            *("expert_parallel.slots", "expert_parallel.window", "expert_parallel.move_bytes_per_step"),
            "expert_parallel.dispatch",
        ),
        (on("expert_parallel.enabled"),),
    ),
    Need(
        (
            *("kv_transfer.port", "kv_transfer.advertise", "kv_transfer.allowed_addresses", "kv_transfer.lease"),
            *("kv_transfer.max_lease", "kv_transfer.max_leased_fraction", "kv_transfer.silence", "kv_transfer.tls."),
        ),
        (_MOVES_BLOCKS,),
    ),
    Need(("kv_transfer.arena",), (When(setting="kv_transfer.transport", values=("auto", "shared_memory", "nixl")),)),
    Need(("error_dump.include_tokens",), (on("error_dump.directory"),)),
)


class CoordinatorClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connection to the coordinator, at which the engine registers."""

    address: Annotated[str, Meta(description="The coordinator's host:port. Empty: the engine does not register.")] = ""
    advertise: Annotated[
        str,
        Meta(
            description=(
                "Address at which frontends reach this engine, as host:port or host. Without a port, server.port is "
                "used. Empty: the host name."
            )
        ),
    ] = ""
    stats_interval: Annotated[
        float, Meta(ge=0.01, le=60, description=("Seconds between two load reports to the coordinator."))
    ] = 0.1
    reconnect_max: ReconnectMax = 2.0
    tls: ClientTlsConfig = ClientTlsConfig()

    def __post_init__(self) -> None:
        check_fields("coordinator", self)
        if self.advertise:
            try:
                with_default_port(self.advertise, 1)
            except ValueError as e:
                raise ConfigError(f"coordinator.advertise is {self.advertise!r}; it {e}") from None


class ProfilerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The torch profiler."""

    directory: Annotated[
        str, Meta(description="Directory for trace files, one per profile. Empty: profiling is refused.")
    ] = ""


class ErrorDumpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files that are written when a step fails."""

    directory: Annotated[
        str,
        Meta(
            description=(
                "Directory for a JSON file with the scheduler output of each failed step. Empty: the scheduler "
                "output is only logged."
            )
        ),
    ] = ""
    include_tokens: Annotated[
        bool, Meta(description=("Include token ids in the file. Token ids reveal users' text."))
    ] = False


_OWN_NUMBER = secrets.token_hex(4)


class EngineCoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of an engine process."""

    NEEDS: ClassVar[Needs] = NEEDS

    model: ModelConfig
    engine_id: Annotated[
        str,
        Meta(description="Unique name of the engine in its cluster. Empty: the host name and a random suffix."),
    ] = ""
    pool: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "Name of the pool to which this engine belongs. The engines of a pool are of one kind and are "
                "scaled together."
            ),
        ),
    ] = DEFAULT_POOL
    role: Annotated[
        Literal["both", "prefill", "decode"],
        Meta(
            description=(
                "Role of the engine in disaggregated serving. prefill: compute prompts, and hand requests over "
                "after the first token. decode: take over requests from prefill engines. both: do both. If no "
                "other engine is available, an engine serves any request regardless of its role."
            )
        ),
    ] = "both"
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    kernels: KernelsConfig = KernelsConfig()
    structured_output: StructuredOutputConfig = StructuredOutputConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    lora: LoraConfig = LoraConfig()
    multimodal: MultimodalConfig = MultimodalConfig()
    parallel: ParallelConfig = ParallelConfig()
    data_parallel: DataParallelConfig = DataParallelConfig()
    expert_parallel: ExpertParallelConfig = ExpertParallelConfig()
    kv_transfer: KvTransferConfig = KvTransferConfig()
    coordinator: CoordinatorClientConfig = CoordinatorClientConfig()
    server: ServerConfig = ServerConfig(port=50052)
    sessions: SessionsConfig = SessionsConfig()
    peers: PeersConfig = PeersConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: Annotated[LogConfig, REREAD] = LogConfig()
    tracing: TracingConfig = TracingConfig()
    profiler: ProfilerConfig = ProfilerConfig()
    error_dump: ErrorDumpConfig = ErrorDumpConfig()
    plugins: Annotated[
        tuple[str, ...] | None,
        Meta(
            description=(
                "Names of installed plugins to load (entry points of the group penstock.plugins). Unset: all "
                "installed plugins."
            )
        ),
    ] = None
    iteration_log_interval: Annotated[
        float, Meta(ge=0, le=86_400, description="Seconds between two log lines about steps. 0 disables these lines.")
    ] = 10.0
    drain_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description=(
                "Seconds that running requests may continue after a stop signal. The engine then ends the remaining "
                "requests with ABORT."
            ),
        ),
    ] = 30.0
    wedged_after: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description=(
                "Seconds without a completed step, while the engine has work, after which the engine counts as wedged. "
                "The health checks of a wedged engine fail, the coordinator and the frontends are notified, and the "
                "engine's requests resume on other engines."
            ),
        ),
    ] = 120.0

    def __post_init__(self) -> None:
        check_fields("", self)
        if self.kv_transfer.enabled and not self.cache.enable_prefix_caching:
            raise ConfigError(
                f"kv_transfer.transport is {self.kv_transfer.transport!r}, but cache.enable_prefix_caching is false; "
                "transfers identify blocks by their prefix hash, so set cache.enable_prefix_caching to true"
            )
        if self.kv_transfer.connector:
            self._check_connector(self.kv_transfer.connector)
        if self.data_parallel.grouped:
            self._check_rank()
        elif self.expert_parallel.enabled:
            raise ConfigError(
                f"expert_parallel.enabled is true, but data_parallel.size is {self.data_parallel.size}; experts can only be "
                "distributed over a data-parallel group of 2 or more ranks"
            )

    def _check_connector(self, name: str) -> None:
        if not self.cache.enable_prefix_caching:
            raise ConfigError(
                f"kv_transfer.connector is {name!r}, but cache.enable_prefix_caching is false; connectors identify "
                "blocks by their prefix hash, so set cache.enable_prefix_caching to true"
            )
        if self.cache.host_memory:
            raise ConfigError(
                f"kv_transfer.connector is {name!r} and cache.host_memory is {self.cache.host_memory}; only one of "
                "them can load blocks, so set cache.host_memory to 0"
            )

    def _check_rank(self) -> None:
        """Raise ConfigError if a data-parallel rank does not support a setting. A data-parallel rank runs one step at a
        time, in one worker.
        """
        executor, size = self.executor, self.data_parallel.size
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "max_concurrent_batches"):
            if getattr(executor, name) > 1:
                raise ConfigError(
                    f"data_parallel.size is {size} and executor.{name} is {getattr(executor, name)}; a data-parallel "
                    "rank supports only the value 1"
                )
        if self.scheduler.async_scheduling:
            raise ConfigError(
                f"data_parallel.size is {size} and scheduler.async_scheduling is true; data-parallel ranks do not "
                "support asynchronous scheduling, so set scheduler.async_scheduling to false"
            )
        if not self.coordinator.address:
            raise ConfigError(
                f"data_parallel.size is {size}, but coordinator.address is empty; the coordinator forms the group, so "
                "set coordinator.address"
            )
        if self.data_parallel.address:
            check_internal_port(
                self.data_parallel.address, field="data_parallel.address", has_secret=bool(self.parallel.secret_file)
            )

    @property
    def name(self) -> str:
        """The configured engine id, or a generated id. A generated id is unique even if several hosts have the same
        name.
        """
        return self.engine_id or f"{os.uname().nodename}-{_OWN_NUMBER}"
