"""How steps are executed: threads, nodes of workers, and the kernels for CPUs."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common import addresses
from penstock_common.config.checks import check_fields
from penstock_common.config.sections import ClientTlsConfig
from penstock_common.errors import ConfigError


class NodesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts that the workers run on: that of the engine, which is number 0, and those of
    ``python -m penstock_enginecore worker``, which are to have the same configuration.
    """

    size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Nodes, that of the engine among them; each has as many whole stages.",
        ),
    ] = 1
    index: Annotated[
        int, Meta(ge=0, le=63, description="Which of the nodes a worker process is for, from 1 on; the engine is 0.")
    ] = 0
    leader: Annotated[
        str,
        Meta(
            description="Where the engine is for its other nodes, as host or host:port; executor.nodes.port is the port."
        ),
    ] = ""
    port: Annotated[
        int,
        Meta(ge=0, le=65_535, description="Port on which the engine listens for its other nodes; 0: one that is free."),
    ] = 50061
    address: Annotated[
        str,
        Meta(
            description="IP address of this node at which the others reach it, with what stages send each other; empty: the one "
            "that the host's name stands for, on the other nodes the one from which they reach the engine."
        ),
    ] = ""
    timeout: Annotated[
        float,
        Meta(ge=1, le=86_400, description="Seconds in which all nodes must have come together."),
    ] = 600.0
    tls: ClientTlsConfig = ClientTlsConfig()

    def __post_init__(self) -> None:
        check_fields("executor.nodes", self)
        if self.leader:
            try:
                addresses.with_default_port(self.leader, self.port or 1)
            except ValueError as e:
                raise ConfigError(f"executor.nodes.leader is {self.leader!r}; it {e}") from None
        if self.index >= self.size > 1:
            raise ConfigError(
                f"executor.nodes.index is {self.index} and executor.nodes.size {self.size}; nodes are 0 to {self.size - 1}"
            )


MAX_WORKERS = 64
"""Of one engine, all stages together."""


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How steps are executed."""

    kind: Annotated[
        str,
        Meta(
            min_length=1,
            description="Name of the executor: uniproc computes in a thread of the engine's process, multiproc in processes of "
            "their own, auto in these where there are several workers; or one that a plugin registers.",
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Workers that each compute a part of every layer; the model's attention heads must be dealt evenly to "
            "them.",
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Stages that each compute some of the layers, of executor.tensor_parallel_size workers each; "
            "at least as many steps are in flight.",
        ),
    ] = 1
    stage_layers: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(
            description="Layers of each stage, one number per stage; empty: so that a step reads as few bytes "
            "of weights as can be in the largest stage, the head among them."
        ),
    ] = ()
    devices: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(
            description="The GPU of each worker, by torch's numbers, where not worker r has the r-th: on every node as many "
            "as it has workers. CUDA_VISIBLE_DEVICES comes before."
        ),
    ] = ()
    collectives: Annotated[
        Literal["auto", "gloo", "shm"],
        Meta(
            description="How workers on CPUs that share layers exchange what they computed: shm in memory that they share, gloo "
            "over the loopback interface; auto: shm where the package was built with a compiler. Those on GPUs do by NCCL."
        ),
    ] = "auto"
    num_threads: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Threads that compute on the CPU; 0: one per core that the process may use, or as many as "
            "OMP_NUM_THREADS says.",
        ),
    ] = 0
    numa: Annotated[
        bool,
        Meta(
            description="Run a worker's threads on the cores of its GPU's NUMA node, or of several workers on the CPU each on "
            "those of one node, unless the process is kept to one node already."
        ),
    ] = True
    keep_addresses: Annotated[
        bool,
        Meta(
            description="On a GPU, keep weights and KV cache in memory of which the addresses stay when the engine sleeps: it "
            "wakes with the graphs that it had. For one worker, and models that generate."
        ),
    ] = False
    max_concurrent_batches: Annotated[
        int, Meta(ge=1, le=16, description="Steps that are handed to the executor at once.")
    ] = 1
    nodes: NodesConfig = NodesConfig()
    step_timeout: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description="Seconds that a step may take with multiproc; then the log says where each worker is, and the engine "
            "ends. Likewise, but after 60 at least, while the model is loaded and no worker uses the processor.",
        ),
    ] = 300.0

    def __post_init__(self) -> None:
        check_fields("executor", self)
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) > 1 and self.kind == "uniproc":
                raise ConfigError(
                    f"executor.{name} is {getattr(self, name)} and executor.kind is 'uniproc', which has one worker; set "
                    "executor.kind to 'auto' or 'multiproc'"
                )
        if self.num_workers > MAX_WORKERS:
            raise ConfigError(
                f"executor.tensor_parallel_size is {self.tensor_parallel_size} and executor.pipeline_parallel_size "
                f"{self.pipeline_parallel_size}: {self.num_workers} workers, and an engine has at most {MAX_WORKERS}"
            )
        if self.pipeline_parallel_size % self.nodes.size:
            raise ConfigError(
                f"executor.nodes.size is {self.nodes.size} and executor.pipeline_parallel_size {self.pipeline_parallel_size}: "
                "every node has as many whole stages; make the second a multiple of the first"
            )
        if self.stage_layers and len(self.stage_layers) != self.pipeline_parallel_size:
            raise ConfigError(
                f"executor.stage_layers names {len(self.stage_layers)} stages, and executor.pipeline_parallel_size is "
                f"{self.pipeline_parallel_size}; give one number of layers per stage"
            )
        if self.keep_addresses and self.num_workers > 1:
            raise ConfigError(
                f"executor.keep_addresses is true, and there are {self.num_workers} workers; it is for one, set it to false"
            )
        self._check_devices()

    def _check_devices(self) -> None:
        per_node = self.num_workers // self.nodes.size
        if self.devices and len(self.devices) != per_node:
            raise ConfigError(
                f"executor.devices names {len(self.devices)} devices, and a node has {per_node} workers; name one for each"
            )
        if len(set(self.devices)) != len(self.devices):
            twice = next(each for each in self.devices if self.devices.count(each) > 1)
            raise ConfigError(f"executor.devices names device {twice} twice; each worker has its own")

    @property
    def num_workers(self) -> int:
        """Worker processes of the engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def resolved_kind(self) -> str:
        """``kind``, or what auto stands for."""
        if self.kind != "auto":
            return self.kind
        return "multiproc" if self.num_workers > 1 else "uniproc"


class KernelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kernels, most of them for CPUs. Each use of them can be turned off, to find out what is wrong."""

    isa: Annotated[
        Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "baseline", "off"],
        Meta(description="Instruction set; auto: the processor's best; off: torch computes alone."),
    ] = "auto"
    decoder: Annotated[
        bool,
        Meta(
            description="Compute the layers of known models in one call per step, attention included: on CPUs this needs "
            "kernels.attention, on GPUs steps are replayed as CUDA graphs."
        ),
    ] = True
    linear: Annotated[
        bool, Meta(description="Compute the linear layers and experts of all other models with packed weights.")
    ] = True
    attention: Annotated[
        bool,
        Meta(
            description="Attend over the paged cache as it lies, on GPUs in models whose layers run by their modules."
        ),
    ] = True
    sampler: Annotated[
        bool, Meta(description="Find the likeliest tokens, and draw where a request has no filters.")
    ] = True
    graphs: Annotated[
        bool,
        Meta(
            description="Replay steps of up to 512 tokens as CUDA graphs; false: launch each piece by piece, to find faults."
        ),
    ] = True
    capture_at_start: Annotated[
        bool,
        Meta(
            description="Capture the graphs of decode steps before the engine is ready, and leave room for them beside the KV "
            "cache; false: each at its first step, which waits for it."
        ),
    ] = True
    graph_sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=512)], ...],
        Meta(
            description="Decode steps of how many requests are captured at start, each number rounded up to a size that steps "
            "are padded to; empty: all up to scheduler.max_num_seqs. Others are captured at their first step."
        ),
    ] = ()
    cache: Annotated[
        str,
        Meta(
            description="Directory of kernels for GPUs that python -m penstock_enginecore.kernel_cache has compiled; it is never "
            "written to. Others are compiled when they are first needed, into TRITON_CACHE_DIR; empty: all are."
        ),
    ] = ""
    batch_invariant: Annotated[
        bool,
        Meta(
            description="Give each row of a step the same bits whatever is computed beside it, in models of the fused decoder or "
            "of the CPU kernels' decoder; others are refused. On GPUs this is slower, the CPU kernels do so anyway."
        ),
    ] = False

    def __post_init__(self) -> None:
        check_fields("kernels", self)
