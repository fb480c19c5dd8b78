"""The routes of the OpenAI API, and errors of paths that are none of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock_common.config.reread import Reread
from penstock_frontend.api.openai import errors
from penstock_frontend.api.openai.bodies import Bodies
from penstock_frontend.api.openai.chat_completions import ChatCompletions
from penstock_frontend.api.openai.completions import Completions
from penstock_frontend.api.openai.embeddings import Embeddings
from penstock_frontend.api.openai.endpoint import Endpoint, Gate, Handler
from penstock_frontend.api.openai.models import Models
from penstock_frontend.api.openai.tokenization import Tokenization
from penstock_frontend.async_llm import AsyncLLM
from penstock_frontend.chat_calls import ChatCalls
from penstock_frontend.config import FrontendConfig, LimitsConfig


def routes(llm: AsyncLLM, chat: ChatCalls, config: FrontendConfig, limits: Reread[LimitsConfig]) -> Sequence[Route]:
    """All of them."""
    gate, bodies = Gate(config.http), Bodies(config.http)
    name = config.model.name
    models, tokenization = Models(llm, config.model), Tokenization(llm, chat)
    posts: dict[str, Handler] = {
        "/v1/completions": Completions(llm, model=name, limits=limits),
        "/v1/chat/completions": ChatCompletions(llm, chat, model=name),
        "/v1/embeddings": Embeddings(llm, model=name),
        "/tokenize": tokenization.tokenize,
        "/detokenize": tokenization.detokenize,
    }
    gets: dict[str, Handler] = {"/v1/models": models.list, "/v1/models/{name:path}": models.get}
    return [
        *(Route(path, Endpoint(gate, bodies, handler), methods=["POST"]) for path, handler in posts.items()),
        *(Route(path, Endpoint(gate, bodies, handler), methods=["GET"]) for path, handler in gets.items()),
    ]


async def _on_http_error(request: Request, error: Exception) -> Response:
    """A path or a method that nothing serves."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not serve {request.method}"}
    code = {404: "path_not_found", 405: "method_not_allowed"}
    failure = errors.HttpError(status, message.get(status, f"HTTP {status}"), code.get(status, "http_error"))
    answer = errors.answer(failure)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return Response(answer.body, status, {**headers, **answer.headers}, "application/json")


EXCEPTION_HANDLERS: Mapping[Any, Any] = {HTTPException: _on_http_error}
"""For the Starlette application that the routes are put in."""
