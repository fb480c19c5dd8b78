"""Worker of one device: the model on this device, its memory, and the threads and cores that it uses."""

import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from penstock_common import files
from penstock_common.errors import Internal, InvalidArgument
from penstock_common.process import usable_cores
from penstock_common.security.shared_secret import load_secret
from penstock_enginecore.attention.kv_cache import block_memory, block_order, num_bytes
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.utility import utility
from penstock_enginecore.core.worker_stats import GraphStats, WorkerStats
from penstock_enginecore.executor.device import (
    check_kv_cache_memory,
    cpu_kv_cache_bytes,
    cuda_kv_cache_bytes,
    encoder_cache_bytes,
    resolve_device,
    settle,
    staging_bytes,
)
from penstock_enginecore.executor.loading import ModelRunner, load_runner
from penstock_enginecore.executor.sleep_in_place import KeptSleep, kept_sleep
from penstock_enginecore.forward.cuda.buffers import MAX_CAPTURED_TOKENS, StepShape
from penstock_enginecore.kernel_cache.precompiled import open_cache
from penstock_enginecore.kv_transfer.core.base import BlockFacts
from penstock_enginecore.kv_transfer.kv_copy import WorkerCopies
from penstock_enginecore.lora.store import AdapterReader, LoraStore, MakeReader, Onlooker, peft_reader
from penstock_enginecore.parallel.collectives import (
    Collectives,
    DeviceCollectives,
    GlooCollectives,
    NcclCollectives,
    SharedMemoryCollectives,
    TimedCollectives,
    nccl_group,
)
from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.socket_transport import SocketTransport
from penstock_enginecore.parallel.stage_links import GlooTransport, StageLinks, StageTransport
from penstock_enginecore.speculation.base import num_model_groups
from penstock_enginecore.states.memory import slot_memory, slot_order
from penstock_enginecore.worker.device_thread import use_device
from penstock_enginecore.worker.messages import WorkerConfig

logger = logging.getLogger(__name__)


class Worker:
    """Model, KV cache and memory of one device. The worker loads the model, determines the size of the KV cache, sleeps
    and wakes up.

    ``runner`` executes the steps.
    """

    def __init__(self, config: WorkerConfig, make_reader: MakeReader | None = peft_reader) -> None:
        """Prepare the device. ``make_reader`` creates the reader of LoRA adapters. If ``make_reader`` is None, adapters
        are disabled.
        """
        self._config = config
        self.loras = LoraStore()
        self.copies = WorkerCopies(self._block_memory)
        self.state_copies = WorkerCopies(self._state_memory, checked=True)
        self._engine = config.engine
        lora = self._engine.lora
        self._adapters = AdapterReader(make_reader, lora) if lora.enabled and make_reader is not None else None
        self._device = resolve_device(self._engine.model.device, config.place, self._engine.executor.devices)
        use_device(self._device)
        check_kv_cache_memory(self._engine.cache, self._device)
        cores = max(1, self._settle())
        torch.set_num_threads(self._engine.executor.num_threads or min(torch.get_num_threads(), cores))
        self._collectives, self._links = _connect(config, self._device)
        self._runner: ModelRunner | None = None
        self._kv_cache: KVCacheConfig | None = None
        self._kv_cache_asleep = False
        self._profiler: torch.profiler.profile | None = None
        self._kept: KeptSleep | None = None
        self._kernels = open_cache(self._engine.kernels.cache, self._device)

    def _settle(self) -> int:
        """Bind this thread to CPU cores near the device. Returns the number of cores that this worker may use."""
        place, neighbours = self._config.place, self._config.num_neighbours
        share = usable_cores() // neighbours
        executor = self._engine.executor
        home = settle(self._device, place, neighbours, executor.devices) if executor.numa else None
        if home is None:
            return share
        logger.info(
            "bound the worker process to the NUMA node of the worker's device device=%s node=%d cores=%d",
            self._device,
            home.node,
            len(home.cores),
        )
        return min(share, usable_cores() // home.sharers)

    @property
    def runner(self) -> ModelRunner:
        """Runner that executes the steps. Raises RuntimeError if ``load_model`` has not been called."""
        if self._runner is None:
            raise RuntimeError("load_model has not been called")
        return self._runner

    def load_model(self, progress: Progress) -> ModelInfo:
        """Load the weights and build the runner. Raises ModelLoadError with a message for the operator."""
        onlooker = Onlooker() if self._adapters is None else self._adapters
        runner = load_runner(self._engine, self._device, progress, self._collectives, self._links, onlooker)
        if self._engine.lora.enabled:
            self.loras.attach(runner.adapted, self._adapters, f"the model, computed by {runner.computing},")
        self._runner = runner
        self._kept = kept_sleep(self._engine, runner, self._device)
        return runner.info

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return the KV cache spec of each attention layer, by layer name in execution order."""
        return self.runner.specs

    def available_kv_cache_memory(self) -> int:
        """Return the size in bytes of the memory available for the KV cache.

        If ``cache.kv_cache_memory`` is set, the result is this setting, and on a GPU a step that is too large for a
        CUDA graph runs only to compile its kernels. On a GPU, the result is otherwise the memory that the profiling
        step leaves free, minus the cache of media embeddings, the CUDA graphs and the memory for copies of blocks. On a
        CPU, no profiling step runs, because its peak memory is small compared with the default size of the KV cache.
        """
        if self._engine.cache.kv_cache_memory is not None:
            self._warm_large_step()
            return self._engine.cache.kv_cache_memory
        encoder_cache = encoder_cache_bytes(self._engine, self.runner.info)
        if self._device.type == "cpu":
            neighbours = self._config.num_neighbours
            return cpu_kv_cache_bytes(encoder_cache * neighbours) // neighbours
        torch.cuda.reset_peak_memory_stats(self._device)
        self.runner.profile(self._engine.scheduler.step_tokens, self._engine.scheduler.max_num_seqs)
        torch.cuda.empty_cache()
        left = cuda_kv_cache_bytes(self._engine.cache, self._device)
        return max(left - encoder_cache - self._graph_bytes() - staging_bytes(self._engine), 0)

    def _warm_large_step(self) -> None:
        """Run a step that is too large to be captured, if the device is a GPU and requests can need such a step.
        Otherwise the first long prompt would wait for the compilation of its kernels, and so would all other requests.
        """
        limits = self._engine.scheduler
        if self._device.type == "cuda" and limits.step_tokens > MAX_CAPTURED_TOKENS:
            self.runner.profile(MAX_CAPTURED_TOKENS + 1, min(limits.max_num_seqs, MAX_CAPTURED_TOKENS))
            torch.cuda.empty_cache()

    def _graph_bytes(self) -> int:
        """Return the estimated memory in bytes of the CUDA graphs that are captured at startup."""
        capture, shapes = self.runner.graph_capture, self._captured_shapes()
        if capture is None or not shapes:
            return 0
        taken = capture.measure(shapes, self._engine.cache.block_size, self._free_bytes)
        torch.cuda.empty_cache()
        return taken

    def _captured_shapes(self) -> list[StepShape]:
        """Return the shapes of steps to capture as CUDA graphs at start."""
        capture = self.runner.graph_capture
        return [] if capture is None else capture.shapes(self._engine, self.runner.info.max_len)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the KV cache, and capture steps as CUDA graphs that use this KV cache."""
        self._kv_cache = config
        self.runner.initialize_kv_cache(config)
        capture, shapes = self.runner.graph_capture, self._captured_shapes()
        if capture is not None and shapes:
            capture.run(shapes, num_model_groups(config), config.block_size, self._free_bytes)
        if self._device.type == "cuda" and staging_bytes(self._engine):
            self.copies.begin("prepare")
            self.state_copies.begin("prepare")
        if (kernels := self._kernels) is not None:
            logger.info("loaded Triton kernels found_in_cache=%d compiled=%d", kernels.found, kernels.compiled)

    def _block_memory(self) -> list[torch.Tensor] | None:
        """Return the tensors of the KV cache, or None if no KV cache is allocated."""
        config, runner = self._kv_cache, self._runner
        asleep = self._kv_cache_asleep or (self._kept is not None and self._kept.cache_is_gone)
        return None if config is None or runner is None or asleep else block_memory(runner.caches, config.num_blocks)

    def _state_memory(self) -> list[torch.Tensor] | None:
        """Return the memory of the closed states of recurrent layers, which are the states at the ends of spans.
        Returns None if this memory is not allocated.
        """
        asleep = self._kept is not None and self._kept.cache_is_gone
        return None if self._runner is None or asleep else slot_memory(self._runner.state_layers)

    def state_facts(self) -> BlockFacts:
        """Return the size and layout of this worker's part of a slot of recurrent states."""
        return BlockFacts(self.state_copies.block_bytes, slot_order(self.runner.state_layers), self.runner.computing)

    def block_facts(self) -> BlockFacts:
        """Return the size and layout of this worker's part of a KV block."""
        return BlockFacts(self.copies.block_bytes, block_order(self.runner.caches), self.runner.computing)

    def skip(self, step: SchedulerOutput) -> None:
        """Skip ``step``, because an earlier step failed. Tells the other pipeline stages that this stage skips the
        step.
        """
        if self._links is not None and step.num_scheduled_tokens:
            self._links.begin()
            self._links.fail()

    def recover(self) -> None:
        """Free unused device memory, forget every request, and test the device by computing a token.

        Waits until the device has finished its work, so errors of the device are raised in this call.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.runner.recover()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # Methods that operators may call by name through the service EngineControl.

    @utility
    def sleep(self, level: int) -> None:
        """Drop the KV cache, and move the weights to host memory (level 1) or drop the weights too (level 2)."""
        if self._kept is not None:
            self._kept.sleep(level)
            self._free_memory()
            return
        self.runner.drop_kv_cache()
        self._kv_cache_asleep = True
        if level == 1:
            self.runner.to(torch.device("cpu"))
        else:
            self._runner = None
            self.loras.detach()
        self._free_memory()

    @utility
    def wake_up(self, tags: list[str]) -> None:
        """Restore the memory that ``tags`` name ("weights", "kv_cache").

        If the weights were dropped, the KV cache is allocated only after the weights are loaded again. A later call may
        load the weights, and the KV cache is then allocated in that call.
        """
        if self._kept is not None:
            self._kept.wake_up(tags, self._device)
            return
        if "weights" in tags:
            if self._runner is None:
                self.load_model(logger.info)
            else:
                self._runner.to(self._device)
        if "kv_cache" in tags:
            self._kv_cache_asleep = False
        if not self._kv_cache_asleep and self._kv_cache is not None and self._runner is not None:
            self.initialize_kv_cache(self._kv_cache)

    @utility
    def start_profile(self) -> None:
        """Start the torch profiler."""
        if not self._engine.profiler.directory:
            raise InvalidArgument(
                "cannot start a profile: profiler.directory is not set; set it to a directory for traces"
            )
        if self._profiler is not None:
            raise InvalidArgument("a profile is already running; call stop_profile first", reason="PROFILING")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    @utility
    def stop_profile(self) -> str:
        """Stop the profiler. Returns the path of the profiler's trace, for chrome://tracing or Perfetto."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise InvalidArgument("no profile is running; call start_profile first", reason="NOT_PROFILING")
        profiler.stop()
        path = Path(self._engine.profiler.directory) / f"trace-{os.getpid()}-{time.time_ns()}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The profiler would write through a symbolic link at the path of the trace. So the profiler writes to a
            # private directory, and the rename replaces a link instead of the link's target.
            with tempfile.TemporaryDirectory(dir=path.parent) as private:
                written = Path(private, path.name)
                profiler.export_chrome_trace(str(written))
                written.chmod(files.MODE)
                written.replace(path)
        except OSError as e:
            raise Internal(f"profiler.directory: {path} cannot be written: {e}") from e
        return str(path)

    @utility
    def held_loras(self) -> list[bytes]:
        """Return the digests of the LoRA adapters that this worker has loaded."""
        return self.loras.digests

    @utility
    def worker_info(self) -> dict[str, Any]:
        """Return the worker's device, dtype, number of threads and kernels, and the sizes in bytes of its weights and
        its KV cache.
        """
        runner = self._runner
        return {
            "rank": self._config.rank,
            "stage": self._config.stage,
            "device": str(self._device),
            "dtype": runner.info.dtype if runner else "",
            "num_threads": torch.get_num_threads(),
            "computing": runner.computing if runner else "",
            "weight_bytes": runner.weight_bytes if runner else 0,
            "kv_cache_bytes": _cache_bytes(runner) if runner else 0,
        }

    def stats(self) -> WorkerStats:
        """Return the worker's statistics for metrics. Thread-safe, also while steps run."""
        runner, kept, device = self._runner, self._kept, self._device
        on_device = device.type == "cuda"
        free, total = torch.cuda.mem_get_info(device) if on_device else (0, 0)
        return WorkerStats(
            rank=self._config.rank,
            device=str(device),
            device_name=torch.cuda.get_device_name(device) if on_device else "",
            total_memory=total,
            used_memory=total - free,
            weight_bytes=0 if runner is None or (kept and kept.weights_are_gone) else runner.weight_bytes,
            kv_cache_bytes=0
            if runner is None or (kept and kept.cache_is_gone)
            else num_bytes(runner.caches) + runner.state_bytes,
            graphs=runner.graphs if runner else GraphStats(),
            collectives=self._collectives.times() if self._collectives else {},
            stage=self._config.stage,
            waited_for_stages=self._links.waited if self._links else None,
        )

    def _free_bytes(self) -> int:
        """Return the size in bytes of the free device memory, or 0 on a CPU."""
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0

    def _free_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def shutdown(self) -> None:
        """Free the model and the KV cache."""
        self.copies.stop()
        self.state_copies.stop()
        self._runner = None
        if self._links is not None:
            self._links.close()
        self.loras.detach()
        if self._kept is not None:
            self._kept.close()
            self._kept = None
        self._free_memory()


def _cache_bytes(runner: ModelRunner) -> int:
    """Return the size in bytes of the KV cache and the memory for recurrent states."""
    return num_bytes(runner.caches) + runner.state_bytes


def _connect(config: WorkerConfig, device: torch.device) -> tuple[TimedCollectives | None, StageLinks | None]:
    """Connect this worker to the other workers of its tensor-parallel group, and to one worker of each other pipeline
    stage.

    In the other stages, this is the worker with the same tensor-parallel rank. Raises ConfigError if a setting does not
    allow the connections.
    """
    if config.store is None:
        return None, None
    size, num_stages = config.engine.executor.tensor_parallel_size, config.engine.executor.pipeline_parallel_size
    collectives, links = None, None
    if size > 1:
        collectives = TimedCollectives(_collectives(Meeting(config.store), config, device))
    if num_stages > 1:
        links = StageLinks(_transport(config.store, config, num_stages))
    return collectives, links


def _transport(store: int, config: WorkerConfig, num_stages: int) -> StageTransport:
    name, node = f"stages {config.tensor_rank}", config.node
    if node is None:
        return GlooTransport(Meeting(store), config.stage, num_stages, name)
    secret = load_secret(config.engine.parallel.secret_file)
    return SocketTransport(Meeting(node.meeting, node.address, secret), config.stage, num_stages, name)


def _collectives(meeting: Meeting, config: WorkerConfig, device: torch.device) -> Collectives:
    rank, size, name = config.tensor_rank, config.engine.executor.tensor_parallel_size, f"tensor {config.stage}"
    if device.type == "cpu" and config.exchange is not None:
        return SharedMemoryCollectives(config.exchange, rank, size)
    host = GlooCollectives(meeting, rank, size, name)
    if device.type == "cpu":
        if config.engine.executor.collectives == "auto" and rank == 0:
            logger.warning(
                "workers exchange results over sockets, many times more slowly than over shared memory, because this "
                "package was built without a C++ compiler; install the package again with a C++ compiler"
            )
        return host
    group = nccl_group(meeting, f"{name} on GPUs", rank, size, device)
    return DeviceCollectives(host, NcclCollectives(group, rank, size))
