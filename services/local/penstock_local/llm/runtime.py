"""Runtime of an ``LLM``: an engine on one thread, the frontend's processing on another, and their shutdown."""

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from penstock_common.errors import ConfigError
from penstock_common.memory import host_memory
from penstock_common.observability.logging import configure_library
from penstock_enginecore.app import build_engine, describe
from penstock_enginecore.config import EngineCoreConfig
from penstock_frontend.app.assembly import AssemblyConfig, assemble
from penstock_frontend.config import LimitsConfig, LoraConfig, MediaConfig, ModelConfig
from penstock_frontend.interfaces import OutputHandler
from penstock_local.llm.engine import InProcessEngine
from penstock_local.serving.machine_resources import check_cache_memory, visible_gpus

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MIN_AT_ONCE = 64
_TOKENIZER_THREADS = 2


class Runtime:
    """Model, engine and threads of an ``LLM``. The constructor loads the model and starts both threads.

    The runtime has no reference to the ``LLM``. So the ``LLM`` can be garbage-collected, which closes the runtime.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        *,
        tokenizer: str = "",
        adapters: Mapping[str, str] | None = None,
        media: MediaConfig = MediaConfig(),  # noqa: B008 - it is not changed
        limits: LimitsConfig = LimitsConfig(),  # noqa: B008 - it is not changed
    ) -> None:
        """Load the model. Raises ConfigError and ModelLoadError.

        ``tokenizer`` is the path of a tokenizer that replaces the model's. ``adapters`` has LoRA adapter directories by
        name.
        """
        check_cache_memory(
            "kv_cache_memory",
            config.cache.kv_cache_memory,
            device=config.model.device,
            gpus=visible_gpus(os.environ),
            memory=host_memory(),
        )
        # Import torch only after the options are checked.
        from penstock_enginecore.executor.factory import make_executor
        from penstock_enginecore.structured_output.factory import make_grammar_backend

        configure_library()
        self.config = config
        self.tokenizer_path = tokenizer

        def engine(outputs: OutputHandler, _: object) -> InProcessEngine:
            core = build_engine(config, make_executor(config), make_grammar_backend, logger.info)
            self.eos_token_ids = core.model.eos_token_ids
            self._loop = (
                asyncio.new_event_loop()
            )  # created only after loading, because the loop would not be closed if loading failed
            return InProcessEngine(core, describe(config, core), outputs, self._loop)

        model = _model(config)
        media = msgspec.structs.replace(media, enabled=config.multimodal.enabled)
        lora = LoraConfig(adapters=dict(adapters or {}))
        if model.name in lora.adapters:
            raise ConfigError(f"lora: {model.name!r} is the model's own name; choose another name for the adapter")
        assembly = assemble(
            AssemblyConfig(model=model, tokenizer_threads=_TOKENIZER_THREADS, lora=lora, media=media, limits=limits),
            engine,
            tokenizer_path=tokenizer,
        )
        self.model, self.assembly = model, assembly
        self.tokenizer, self.labels = assembly.tokenizer, assembly.labels
        self.engine, self.llm, self.chat = assembly.engines, assembly.llm, assembly.chat
        self.prompts = assembly.llm.pooling.inputs.prompts
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-llm", daemon=True)
        self._thread.start()
        self.engine.start()

    @property
    def closed(self) -> bool:
        """Whether the runtime is closed and refuses requests."""
        return self._closed

    @property
    def at_once(self) -> int:
        """Number of requests to keep in the engine. The number is large enough that the engine's queue is short but
        never empty.
        """
        return max(_MIN_AT_ONCE, 2 * self.config.scheduler.max_num_seqs)

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Call ``work`` on the event loop's thread and run its coroutine. Cancelling the future cancels the coroutine.

        The coroutine is created on the loop's thread. If the caller's thread created it, a Ctrl-C before the handover
        would leave it unawaited, with a warning.
        """
        outcome: Future[T] = Future()
        self._loop.call_soon_threadsafe(self._start, work, outcome)
        return outcome

    def call(self, function: Callable[[], object]) -> None:
        """Schedule a call of ``function`` on the event loop's thread."""
        self._loop.call_soon_threadsafe(function)

    def _start(self, work: Callable[[], Coroutine[Any, Any, T]], outcome: "Future[T]") -> None:
        task = self._loop.create_task(work())

        def end(ended: "Future[T]") -> None:
            if ended.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        outcome.add_done_callback(end)
        task.add_done_callback(partial(_tell, outcome))

    def close(self) -> None:
        """Cancel running requests, stop both threads, and release the device. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon_threadsafe(self.llm.end_all)
        self.engine.stop()
        gc.unfreeze()  # the busy loop has exempted start-up objects from garbage collection; allow to collect them now
        if (
            self.assembly.media is not None
        ):  # close media first, because only its close method ends the tasks of its workers
            self.submit(self.assembly.media.close).result()
        self.submit(self.assembly.chat.renderer.close).result()
        self.submit(_last_words).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.tokenizer.close()


def _model(config: EngineCoreConfig) -> ModelConfig:
    """Return the engine's model as a configuration of the frontend's processing."""
    return ModelConfig(
        path=config.model.path,
        served_model_name=config.model.served_model_name,
        revision=config.model.revision,
        request_chat_templates=True,  # The only caller is this program.
    )


def _tell(outcome: "Future[T]", task: "asyncio.Task[T]") -> None:
    """Copy the result of the task to the future, unless the future is cancelled."""
    error = None if task.cancelled() else task.exception()
    if task.cancelled():
        outcome.cancel()
    elif not outcome.set_running_or_notify_cancel():
        return
    elif error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


async def _last_words() -> None:
    """Return when all calls have ended. After the cancellation, each call needs one more turn of the event loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
