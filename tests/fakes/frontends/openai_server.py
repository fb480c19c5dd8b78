"""A real frontend with its HTTP port open, and the published OpenAI client for it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from penstock_frontend.config import HttpConfig, ModelConfig
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.patience import PATIENCE


class OpenAIServer:
    """A running frontend. ``client``: OpenAI's client, without retries. ``http``: a plain HTTP client."""

    def __init__(self, server: FrontendServer, client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
        self.server = server
        self.client = client
        self.http = http

    @property
    def port(self) -> int:
        return self.server.frontend.http_port

    @property
    def num_live(self) -> int:
        """Number of requests that the frontend has accepted and not released."""
        return len(self.server.frontend._models[0].assembly.llm._live)


@asynccontextmanager
async def openai_server(
    model: Path | ModelConfig,
    *,
    engines: Sequence[str],
    http: dict[str, Any] | None = None,
    wait: bool = True,
    **options: Any,
) -> AsyncIterator[OpenAIServer]:
    """Start a frontend. ``model``: directory or config; ``http``: fields of HttpConfig; options: fields of
    FrontendConfig.
    """
    if isinstance(model, ModelConfig):
        model, options["model"] = Path(model.path), model
    config = HttpConfig(host="127.0.0.1", port=0, **(http or {}))
    async with FrontendServer(model, engines=engines, http=config, **options) as server:
        if wait:
            await server.until_health(serving=True)
        url = f"http://127.0.0.1:{server.frontend.http_port}"
        plain = openai.DefaultAsyncHttpxClient(
            verify=False
        )  # do not load CA certificates, because that takes longer than a test
        async with (
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE, http_client=plain
            ) as client,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE, verify=False) as raw,
        ):
            yield OpenAIServer(server, client, raw)
