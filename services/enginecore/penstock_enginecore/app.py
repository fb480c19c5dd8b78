"""An engine process: load, serve, drain, stop."""

import contextlib
import hashlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from penstock_common.config_file import ConfigFile
from penstock_common.errors import ConfigError
from penstock_common.metrics_server import MetricsServer
from penstock_common.observability.logging import configure, get_logger
from penstock_common.observability.metrics import Readings
from penstock_common.process import name_process
from penstock_common.security.shared_secret import SharedSecret, load_secret
from penstock_common.tensors.chunks import MAX_TENSOR_BYTES
from penstock_common.tensors.shared_memory import remove_orphans, shared_memory_id
from penstock_common.types.kv_transfer import EngineRole
from penstock_common.types.media import MediaLimits
from penstock_common.types.outputs import EngineReady, LoraLimits
from penstock_enginecore.config import EngineCoreConfig, LoraConfig
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.executor import Executor, Progress
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.data_parallel.group import EngineRank, MakeMeets
from penstock_enginecore.idle_memory import idle_memory_given_back
from penstock_enginecore.kv_transfer.assembly import layout_of, transferring
from penstock_enginecore.kv_transfer.core.host_disk_tiers import BlockStore
from penstock_enginecore.kv_transfer.core.registry import StorePlan
from penstock_enginecore.media.core.encoder_cache import encoder_cache_size
from penstock_enginecore.media.core.receiver_cache import MediaInputs
from penstock_enginecore.metrics import EngineCollector, group_families
from penstock_enginecore.numerics_fingerprint import Loaded, config_of, hash_of
from penstock_enginecore.plugins import load_plugins
from penstock_enginecore.rpc.io_thread import IoThread
from penstock_enginecore.step_dump import dump_step
from penstock_enginecore.structured_output.core.base import GrammarBackendFactory

# Python runs a signal handler on the main thread, between two bytecodes. If a signal arrives just before the main
# thread blocks in C code, the handler does not run until another event wakes the thread. In an idle engine, there may
# be no such event. Therefore a thread of this module reads the wakeup file descriptor, to which the signal is written
# immediately, whatever the main thread does.


@contextlib.contextmanager
def signals_handled(numbers: tuple[signal.Signals, ...], handle: Callable[[], None]) -> Iterator[None]:
    """Call ``handle`` on a separate thread for each signal in ``numbers``, while the context is open. Must be entered
    on the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while received := os.read(reader, 1):
            if received[0] in numbers:
                handle()

    thread = threading.Thread(target=watch, name="signals", daemon=True)
    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, _ignore) for number in numbers}
    thread.start()
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_writer)
        os.close(writer)
        thread.join()
        os.close(reader)


def _ignore(*_: object) -> None:
    """Do nothing. This handler must be installed, because Python writes a signal to the wakeup file descriptor only if
    the signal has a Python handler.
    """


log = get_logger()

GENERATES = ("generate", "prefix_caching", "chunked_prefill")
"""Capabilities that an engine reports if it generates text. A pooling engine reports its tasks as capabilities."""


def run(
    config_file: ConfigFile[EngineCoreConfig],
    make_executor: Callable[[EngineCoreConfig], Executor],
    make_grammars: GrammarBackendFactory | None = None,
    make_meets: MakeMeets | None = None,
) -> None:
    """Load the model and serve requests, until a shutdown after SIGTERM or SIGINT is complete.

    While the model loads, the port is open, and the health status is NOT_SERVING. At the beginning of each phase, a log
    line has the seconds since the process started. A signal during loading ends the process immediately, because there
    are no requests to drain. Raises ConfigError, ModelLoadError, or the error that ended the busy loop.
    """
    config = config_file.running
    configure(config.log, service="enginecore")
    name_process("enginecore", config.engine_id)
    started = time.monotonic()
    secret = load_secret(config.parallel.secret_file)
    load_plugins(config.plugins)

    def progress(text: str) -> None:
        log.info(text, seconds=round(time.monotonic() - started, 1))

    io = IoThread(config, config_file)
    io.start()
    try:
        progress("importing torch and transformers")
        executor = make_executor(config)
        engine = build_engine(config, executor, make_grammars, progress, media_inputs(io))
        try:
            engine.warm_up()
            serve(config, engine, io, started, make_meets, secret)
        finally:
            engine.shutdown()
    finally:
        io.stop()


def build_engine(
    config: EngineCoreConfig,
    executor: Executor,
    make_grammars: GrammarBackendFactory | None,
    progress: Progress,
    inputs: MediaInputs = MediaInputs(),  # noqa: B008 - it is immutable
) -> EngineCore:
    """Load the model and return the engine. ``progress`` gets a message at the beginning of each phase. Before this
    function raises ConfigError or ModelLoadError, it shuts the executor down.
    """
    try:
        return EngineCore(
            config,
            executor,
            make_grammars=make_grammars,
            keep_failed_step=partial(dump_step, config=config.error_dump),
            open_store=_open_disk,
            media_inputs=inputs,
            progress=progress,
        )
    except BaseException:
        executor.shutdown()
        raise


def serve(
    config: EngineCoreConfig,
    engine: EngineCore,
    io: IoThread,
    started: float,
    make_meets: MakeMeets | None = None,
    secret: SharedSecret | None = None,
) -> None:
    """Run the busy loop of a loaded engine on this thread.

    ``started`` is the start time of the process in monotonic seconds, for the log. ``make_meets`` and ``secret`` let a
    rank connect to its data-parallel group. Raises ConfigError if a group is configured without ``make_meets``.
    """
    ready = describe(config, engine)
    if ready.shared_memory_id:
        remove_orphans()
    traces = io.sessions.traces
    with transferring(
        config,
        engine,
        ready,
        certificates=io.certificates,
        registry=io.registry,
        observe=(lambda _: None) if traces is None else traces.transferred,
        observer=io.telemetry,
    ) as ready:
        _serve(config, engine, io, started, ready, make_meets, secret)


def _serve(
    config: EngineCoreConfig,
    engine: EngineCore,
    io: IoThread,
    started: float,
    ready: EngineReady,
    make_meets: MakeMeets | None,
    secret: SharedSecret | None,
) -> None:
    rank: EngineRank | None = None
    if config.data_parallel.grouped:
        if make_meets is None:
            raise ConfigError(
                f"data_parallel.size is {config.data_parallel.size}, but this process does not support data-parallel "
                "groups; set data_parallel.size to 1"
            )
        rank = EngineRank(config, engine, ready, make_meets, secret)
        io.registry.register(Readings(lambda: group_families(rank.driver.state, rank.target_size, ready)))
    group = None if rank is None else rank.driver
    control = EngineControl(engine, group)
    busy_loop = BusyLoop(engine, control, io.sessions, group=group)
    workers = engine.executor.worker_stats
    io.registry.register(EngineCollector(busy_loop.stats, control.state, engine.counts.tokens, ready, workers))
    metrics = MetricsServer(config.metrics, io.registry, io.certificates)
    try:
        with (
            signals_handled((signal.SIGTERM, signal.SIGINT), busy_loop.request_shutdown),
            idle_memory_given_back(busy_loop, lambda: io.sessions.tensors.num_drops),
        ):
            io.attach(busy_loop, ready, rank)
            log.info(
                "engine ready", engine=ready.engine_id, model=ready.model, seconds=round(time.monotonic() - started, 1)
            )
            busy_loop.run()
    finally:
        if group is not None:
            group.links.close()
        metrics.stop()


def media_inputs(io: IoThread) -> MediaInputs:
    """Return an object that measures and clears the media inputs that the engine has cached for frontends' sessions."""
    return MediaInputs(lambda: io.sessions.received.num_bytes, io.sessions.clear_media)


def _capabilities(config: EngineCoreConfig, engine: EngineCore) -> tuple[str, ...]:
    more = (*(("lora",) if config.lora.enabled else ()), *(each.modality for each in engine.model.media))
    if engine.model.pooling:
        return (*engine.model.pooling.words, *more)
    events: tuple[str, ...] = ("followed_cache",) if config.cache.enable_prefix_caching else ()
    if config.cache.enable_kv_events:
        events = (*events, "kv_events")
    if events and engine.connector is not None:
        events = (*events, "kv_tier_events")
    if events and engine.model.states is not None:
        events = (*events, "states")
    return (*GENERATES, *events, *more)


def computes_of(config: EngineCoreConfig, model: ModelInfo) -> dict[str, str]:
    """Return the names and values of all properties of the engine that can change its tokens."""
    return config_of(
        config.model,
        Loaded(
            dtype=model.dtype,
            task=" ".join(model.pooling.words) if model.pooling else "generate",
            max_len=model.max_len,
            eos_token_ids=model.eos_token_ids,
            enable_in_reasoning=config.structured_output.enable_in_reasoning,
            tensor_parallel_size=config.executor.tensor_parallel_size,
            cache_dtype=config.cache.dtype,
            fp8_activations=config.kernels.fp8_activations,
            batch_invariant=config.kernels.batch_invariant,
        ),
    )


def _open_disk(config: EngineCoreConfig, model: ModelInfo, kv_cache: KVCacheConfig, plan: StorePlan) -> BlockStore:
    """Open a file of the disk tier, for KV blocks or for states of recurrent layers. The fingerprint of the file covers
    the model, the KV cache, the states and the kernels.
    """
    from penstock_enginecore.kv_transfer.disk_file import FILE_NAME, STATES_FILE_NAME, DiskFile  # torch is imported.

    blocks, states = plan.copiers.blocks, plan.copiers.states
    layout = layout_of(
        kv_cache,
        computes_of(config, model),
        order=blocks.order,
        num_shards=config.executor.num_workers,
        block_bytes=blocks.block_bytes,
        numerics=blocks.numerics,
        states=states,
    )
    fingerprint = b""
    if layout.fingerprint:
        fingerprint = hashlib.blake2b(layout.fingerprint + layout.numerics.encode(), digest_size=16).digest()
    directory = Path(config.cache.disk)
    if states is None:
        return DiskFile(directory, plan.size, blocks.block_bytes, fingerprint)
    copier, name, part = (states, STATES_FILE_NAME, "states") if plan.of_states else (blocks, FILE_NAME, "KV blocks")
    setting = f"the part of cache.disk_size for {part}"
    return DiskFile(directory, plan.size, copier.block_bytes, fingerprint, name, setting)


def describe(config: EngineCoreConfig, engine: EngineCore) -> EngineReady:
    """Return the description of the engine that frontends get: its identity and its limits."""
    model = engine.model
    computes = computes_of(config, model)
    takes_tensors = bool(model.media or model.hidden_size)
    return EngineReady(
        engine_id=config.name,
        incarnation=uuid.uuid4().hex,
        model=config.model.name,
        revision=computes.get("revision", ""),
        max_model_len=engine.max_model_len,
        num_kv_blocks=engine.kv_cache_config.num_blocks,
        block_size=engine.kv_cache_config.block_size,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        embedding_size=model.pooling.embedding_size if model.pooling is not None else 0,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_message_bytes=config.server.max_message_bytes,
        max_tensor_bytes=MAX_TENSOR_BYTES,
        config=computes,
        config_hash=hash_of(computes),
        data_parallel_size=config.data_parallel.size,
        capabilities=_capabilities(config, engine),
        lora=_lora_limits(config.lora),
        role=EngineRole[config.role.upper()],
        shared_memory_id=shared_memory_id() if takes_tensors and config.multimodal.shared_memory else "",
        **_media(config, engine),
    )


def _media(config: EngineCoreConfig, engine: EngineCore) -> dict[str, Any]:
    """Return the values of the fields of ``EngineReady`` that describe media."""
    if not engine.model.media:
        return {}
    most = config.multimodal.limit_per_prompt
    limits = (  # Each media item has at least one position in the prompt.
        MediaLimits(
            modality=each.modality,
            max_items=most.get(each.modality, engine.max_model_len),
            max_tokens=each.max_tokens,
        )
        for each in engine.model.media
    )
    return {
        "media": tuple(limits),
        "encoder_cache_size": encoder_cache_size(
            config.multimodal.encoder_cache_size, engine.config.scheduler.step_tokens, engine.model
        ),
        "receiver_cache_bytes": config.multimodal.receiver_cache_quota,
    }


def _lora_limits(config: LoraConfig) -> LoraLimits | None:
    if not config.enabled:
        return None
    return LoraLimits(max_loras=config.max_loras, max_lora_rank=config.max_lora_rank, cpu_memory=config.cpu_memory)
