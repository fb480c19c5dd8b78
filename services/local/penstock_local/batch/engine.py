"""Backend of a batch with an engine in this process."""

from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any

from penstock_common.errors import Unavailable
from penstock_frontend.app.openai_calls import OpenAICalls
from penstock_frontend.config import HttpConfig
from penstock_local.batch.backend import URLS, Answer
from penstock_local.llm.options import engine_config
from penstock_local.llm.runtime import Runtime


class LocalEngine:
    """Engine of an ``LLM``, called through the same routes as a server."""

    def __init__(self, model: str, options: Mapping[str, object], adapters: Mapping[str, str]) -> None:
        """Load the model. ``adapters`` has LoRA adapter directories by name. Raises ConfigError and ModelLoadError."""
        self._runtime = Runtime(engine_config(model, options, num_adapters=len(adapters)), adapters=adapters)
        self._calls = OpenAICalls(self._runtime.assembly, self._runtime.model, HttpConfig())

    @property
    def urls(self) -> Collection[str]:
        return [url for url in URLS if url in self._calls.paths]

    @property
    def at_once(self) -> int:
        return self._runtime.at_once

    def submit(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> "Future[Any]":
        return self._runtime.submit(work)

    async def post(self, url: str, body: bytes) -> Answer:
        answer = await self._calls.post(url, body)
        if answer.status >= 500 and not self._runtime.engine.usable:
            raise Unavailable("the engine died; finished lines are kept", reason="ENGINE_DEAD")
        return Answer(answer.status, answer.body, answer.request_id)

    def close(self) -> None:
        self._runtime.close()
