"""What an ``LLM`` consists of: an engine on one thread, the frontend's processing on another, and how they stop."""

import asyncio
import gc
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock_common.logging import configure_library
from penstock_enginecore.app import describe
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_frontend.async_llm import AsyncLLM
from penstock_frontend.config import LimitsConfig
from penstock_frontend.config import ModelConfig as FrontendModelConfig
from penstock_frontend.metrics import FrontendMetrics
from penstock_frontend.observe import RequestObserver
from penstock_frontend.pooling import PoolingCalls
from penstock_frontend.processing.chat import ChatRenderer
from penstock_frontend.processing.chat_template import load_chat_templates
from penstock_frontend.processing.input import InputProcessor
from penstock_frontend.processing.output import OutputProcessor
from penstock_frontend.processing.pooled import PooledOutputs, SplitOutputs
from penstock_frontend.processing.pooling import PoolingInputs
from penstock_frontend.processing.tokenizer import load_model_files
from penstock_local.inprocess.engine import InProcessEngine

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TOKENIZER_THREADS = 2


class Runtime:
    """Loads the model and starts both threads. Holds nothing that belongs to the ``LLM``, which closes it when it goes."""

    def __init__(self, config: EngineCoreConfig) -> None:
        """Raises ConfigError and ModelLoadError."""
        # torch is imported here, after the options are checked
        from penstock_enginecore.executor.factory import make_executor
        from penstock_enginecore.structured_output.factory import make_grammar_backend

        configure_library()
        model = FrontendModelConfig(
            path=config.model.path,
            served_model_name=config.model.served_model_name,
            revision=config.model.revision,
        )
        limits = LimitsConfig()
        files = load_model_files(model, num_threads=_TOKENIZER_THREADS)
        templates = load_chat_templates(model)
        self.config = config
        self._tokenizer = files.tokenizer
        self._loop = asyncio.new_event_loop()
        metrics = FrontendMetrics(model.name)
        outputs = OutputProcessor(files.tokenizer, metrics)
        pooled = PooledOutputs(lambda state, engine: metrics.engine(engine).pooled(state.started, state.num_prompt))
        inputs = InputProcessor(files.tokenizer, files.generation_config, model_name=model.name, limits=limits)
        core = EngineCore(config, make_executor(config), make_grammars=make_grammar_backend, progress=logger.info)
        self.engine = InProcessEngine(core, describe(config, core), SplitOutputs(outputs, pooled), self._loop)
        self.llm = AsyncLLM(
            tokenizer=files.tokenizer,
            inputs=inputs,
            outputs=outputs,
            engines=self.engine,
            limits=limits,
            observer=RequestObserver(metrics),
            pooling=PoolingCalls(
                inputs=PoolingInputs(files.tokenizer, inputs, limits), outputs=pooled, engines=self.engine
            ),
        )
        self.chats = ChatRenderer(templates, files.tokenizer, limits)
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-llm", daemon=True)
        self._thread.start()
        self.engine.start()

    @property
    def closed(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._closed

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run ``work`` on the event loop's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End what runs, stop both threads, release the device. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon_threadsafe(self.llm.end_all)
        self.engine.stop()
        gc.unfreeze()  # the busy loop had spared what start-up built from the collector; now it may go
        self.submit(_last_words()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._tokenizer.close()


async def _last_words() -> None:
    """Return when every call has ended: each learns of the end in one of the loop's next turns."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
