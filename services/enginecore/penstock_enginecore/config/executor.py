"""Settings of step execution: threads, nodes of workers, and kernels."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common import addresses
from penstock_common.config.checks import check_fields
from penstock_common.config.sections import ClientTlsConfig
from penstock_common.errors import ConfigError


class NodesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts on which the workers run. The engine's host is node 0. The other hosts run ``python -m penstock_enginecore
    worker`` with the same configuration.
    """

    size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description=("Number of nodes, including the engine's. Each node runs the same number of pipeline stages."),
        ),
    ] = 1
    index: Annotated[
        int,
        Meta(
            ge=0,
            le=63,
            description=("Number of this node, from 1, if the process runs only workers. The engine's node is 0."),
        ),
    ] = 0
    leader: Annotated[
        str,
        Meta(
            description=(
                "Address of the engine for its other nodes, as host or host:port. Without a port, "
                "executor.nodes.port is used."
            )
        ),
    ] = ""
    port: Annotated[
        int,
        Meta(ge=0, le=65_535, description="Port on which the engine listens for its other nodes. 0: any free port."),
    ] = 50061
    address: Annotated[
        str,
        Meta(
            description=(
                "IP address at which the other nodes reach this node, for the data between pipeline stages. Empty: "
                "on the engine's node, the address of the host name; on the other nodes, the local address of their "
                "connection to the engine."
            )
        ),
    ] = ""
    timeout: Annotated[
        float,
        Meta(ge=1, le=86_400, description="Seconds within which all nodes must be connected."),
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
                f"executor.nodes.index is {self.index}, but executor.nodes.size is {self.size}; nodes are 0 to "
                f"{self.size - 1}"
            )


MAX_WORKERS = 64
"""Maximum number of workers of one engine, over all pipeline stages."""


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Execution of steps."""

    kind: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "Name of the executor. uniproc computes in a thread of the engine's process, multiproc in one "
                "process per worker. auto: multiproc with several workers, otherwise uniproc. Plugins can "
                "register more names."
            ),
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description=(
                "Number of workers that split each layer (tensor parallelism). The model's attention heads must divide "
                "evenly among them."
            ),
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description=(
                "Number of pipeline stages. Each stage computes some of the layers, with "
                "executor.tensor_parallel_size workers. At least as many steps are in flight as there are stages."
            ),
        ),
    ] = 1
    stage_layers: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(
            description=(
                "Number of layers of each pipeline stage. Empty: the split that minimizes the bytes of weights that "
                "the largest stage, including the output head, reads per step."
            )
        ),
    ] = ()
    devices: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(
            description=(
                "GPU index of each worker on this node, in torch's numbering after CUDA_VISIBLE_DEVICES. Empty: "
                "worker r of the node uses GPU r."
            )
        ),
    ] = ()
    collectives: Annotated[
        Literal["auto", "gloo", "shm"],
        Meta(
            description=(
                "Data exchange between tensor-parallel workers on CPUs. shm: shared memory. gloo: the loopback "
                "interface. auto: shm if the package was built with a compiler, otherwise gloo. Workers on GPUs "
                "always use NCCL."
            )
        ),
    ] = "auto"
    num_threads: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description=(
                "CPU threads of a worker. 0: one thread per core that the process may use, or OMP_NUM_THREADS if "
                "that is less."
            ),
        ),
    ] = 0
    numa: Annotated[
        bool,
        Meta(
            description=(
                "Bind a worker's threads to the cores of one NUMA node: with a GPU, the GPU's node; with several CPU "
                "workers, one node each. The setting has no effect if the process is already bound to one node."
            )
        ),
    ] = True
    keep_addresses: Annotated[
        bool,
        Meta(
            description=(
                "Keep the GPU addresses of weights and KV cache during sleep, so that captured CUDA graphs stay "
                "valid. Supported only for one worker and generating models."
            )
        ),
    ] = False
    max_concurrent_batches: Annotated[
        int,
        Meta(
            ge=1,
            le=16,
            description=(
                "Maximum number of steps in flight in the executor. The limit is never below the number of pipeline "
                "stages, plus 1 with asynchronous scheduling."
            ),
        ),
    ] = 1
    nodes: NodesConfig = NodesConfig()
    step_timeout: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description=(
                "Maximum seconds for a step with the executor multiproc. After a timeout, the engine logs the state of "
                "each worker and exits. While the model loads, only time without CPU use by any worker counts, and the "
                "limit is at least 60 seconds."
            ),
        ),
    ] = 300.0

    def __post_init__(self) -> None:
        check_fields("executor", self)
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) > 1 and self.kind == "uniproc":
                raise ConfigError(
                    f"executor.{name} is {getattr(self, name)}, but executor.kind is 'uniproc', which has only one "
                    "worker; set executor.kind to 'auto' or 'multiproc'"
                )
        if self.num_workers > MAX_WORKERS:
            raise ConfigError(
                f"executor.tensor_parallel_size is {self.tensor_parallel_size} and executor.pipeline_parallel_size is "
                f"{self.pipeline_parallel_size}, which makes {self.num_workers} workers; the limit is {MAX_WORKERS}"
            )
        if self.pipeline_parallel_size % self.nodes.size:
            raise ConfigError(
                f"executor.nodes.size is {self.nodes.size} and executor.pipeline_parallel_size is "
                f"{self.pipeline_parallel_size}; each node runs the same number of stages, so make "
                "executor.pipeline_parallel_size a multiple of executor.nodes.size"
            )
        if self.stage_layers and len(self.stage_layers) != self.pipeline_parallel_size:
            raise ConfigError(
                f"executor.stage_layers has {len(self.stage_layers)} entries, but executor.pipeline_parallel_size "
                f"is {self.pipeline_parallel_size}; give one number of layers per stage"
            )
        if self.keep_addresses and self.num_workers > 1:
            raise ConfigError(
                f"executor.keep_addresses is true, but there are {self.num_workers} workers; this setting supports only one "
                "worker, so set executor.keep_addresses to false"
            )
        self._check_devices()

    def _check_devices(self) -> None:
        per_node = self.num_workers // self.nodes.size
        if self.devices and len(self.devices) != per_node:
            raise ConfigError(
                f"executor.devices has {len(self.devices)} entries, but a node has {per_node} workers; give one "
                "device per worker"
            )
        if len(set(self.devices)) != len(self.devices):
            twice = next(each for each in self.devices if self.devices.count(each) > 1)
            raise ConfigError(f"executor.devices has device {twice} twice; give each worker a different device")

    @property
    def num_workers(self) -> int:
        """Number of workers of the engine: tensor-parallel size times pipeline stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def resolved_kind(self) -> str:
        """Name of the executor. If ``kind`` is auto, the name of the executor that auto selects."""
        if self.kind != "auto":
            return self.kind
        return "multiproc" if self.num_workers > 1 else "uniproc"


class KernelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compute kernels. Each kind of kernel can be turned off to isolate a fault."""

    isa: Annotated[
        Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "baseline", "off"],
        Meta(
            description=(
                "Instruction set of the CPU kernels. auto: the best that the processor supports. off: use PyTorch "
                "instead of the kernels."
            )
        ),
    ] = "auto"
    decoder: Annotated[
        bool,
        Meta(
            description=(
                "Compute the layers of known models, including attention, in one call per step. On CPUs, the single "
                "call needs kernels.attention. On GPUs, it allows the engine to replay steps as CUDA graphs."
            )
        ),
    ] = True
    encoder: Annotated[
        bool,
        Meta(description=("Compute the layers of known encoders on CPUs, including attention, in one call per step.")),
    ] = True
    linear: Annotated[
        bool,
        Meta(
            description=(
                "Compute linear layers and experts with packed weights, in models that kernels.decoder does not cover."
            )
        ),
    ] = True
    attention: Annotated[
        bool,
        Meta(
            description=(
                "Use the paged attention kernels, which read the KV cache in place. On GPUs, these kernels apply only "
                "to models that run with their PyTorch modules."
            )
        ),
    ] = True
    attention_library: Annotated[
        Literal["auto", "triton", "cudnn", "flashinfer"],
        Meta(
            description=(
                "Library for the attention of prompts on GPUs: of requests with at least 512 new tokens and 4096 tokens "
                "in total, in layers without a smaller window, soft cap or sinks. triton: the same kernels as for all "
                "other requests. cudnn: cuDNN; such steps do not use CUDA graphs. The engine refuses to start if the "
                "check of cuDNN's results fails. auto: cudnn from compute capability 9.0 on if the check passes, "
                "otherwise triton. flashinfer: not supported yet, and refused."
            )
        ),
    ] = "auto"
    states: Annotated[
        bool,
        Meta(
            description=(
                "Use the CPU kernels for recurrent layers. No effect on GPUs, where kernels.attention also "
                "selects the kernels of recurrent layers."
            )
        ),
    ] = True
    sampler: Annotated[
        bool,
        Meta(description=("Use kernels to select the likeliest tokens, and to sample for requests without filters.")),
    ] = True
    graphs: Annotated[
        bool,
        Meta(
            description=(
                "Replay steps of up to 512 tokens, and of about 1024 and 2048 tokens, as CUDA graphs. false: launch "
                "every kernel separately, to isolate a fault."
            )
        ),
    ] = True
    dependent_launch: Annotated[
        bool,
        Meta(
            description=(
                "On GPUs of compute capability 9.0 or later, launch each kernel of the fused decoder before the "
                "previous kernel has ended (programmatic dependent launch). No effect on other devices. false: start "
                "each kernel after the previous kernel, to isolate a fault."
            )
        ),
    ] = True
    capture_at_start: Annotated[
        bool,
        Meta(
            description=(
                "Capture the graphs of steps before the engine is ready, and reserve GPU memory for them. false: "
                "capture each graph at its first step, which delays that step."
            )
        ),
    ] = True
    graph_sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=512)], ...],
        Meta(
            description=(
                "Numbers of requests for which decode steps are captured at start, each rounded up to a padded size. "
                "Empty: all sizes up to scheduler.max_num_seqs, and steps with prompts. Other graphs are captured at "
                "their first step."
            )
        ),
    ] = ()
    cache: Annotated[
        str,
        Meta(
            description=(
                "Directory of precompiled GPU kernels, made with python -m penstock_enginecore.kernel_cache. The "
                "engine never writes to it. Kernels that are not in the directory are compiled at first use, into "
                "TRITON_CACHE_DIR. Empty: all kernels are compiled at first use."
            )
        ),
    ] = ""
    fp8_activations: Annotated[
        Literal["auto", "off"],
        Meta(
            description=(
                "Round inputs of linear layers to 8-bit floats, in steps of at least 512 tokens on GPUs. auto: if the "
                "checkpoint has 8-bit weights with a scale per row or tensor, and its config says that activations have "
                "8-bit floats, on GPUs of compute capability 8.9 or more. off: never. Ignored with "
                "kernels.batch_invariant and with float32."
            )
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        Meta(
            description=(
                "Make the results of a request bit-identical regardless of the other requests in its batch. Supported "
                "only for models with a fused decoder, on GPUs or with the CPU kernels; other models are refused. On "
                "GPUs, this setting makes steps slower. The CPU kernels are always batch-invariant."
            )
        ),
    ] = False

    def __post_init__(self) -> None:
        check_fields("kernels", self)
        if self.attention_library == "flashinfer":
            raise ConfigError(
                "kernels.attention_library is 'flashinfer', which this version does not support; use 'cudnn', 'triton' or 'auto'"
            )
        if self.attention_library == "cudnn" and self.batch_invariant:
            raise ConfigError(
                "kernels.attention_library is 'cudnn', but kernels.batch_invariant is true, and the results of cuDNN depend on "
                "the sizes of a step; set kernels.attention_library to 'auto', or kernels.batch_invariant to false"
            )
