"""The routes of the OpenAI API, and errors of paths that are none of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock_common.config.reread import Reread
from penstock_frontend.api.anthropic import errors as anthropic
from penstock_frontend.api.openai import errors, lora_adapters
from penstock_frontend.api.openai.bodies import Bodies
from penstock_frontend.api.openai.chat_completions import ChatCompletions
from penstock_frontend.api.openai.completions import Completions
from penstock_frontend.api.openai.embeddings import Embeddings
from penstock_frontend.api.openai.endpoint import REQUEST_ID, Endpoint, Gate, Handler
from penstock_frontend.api.openai.lora_adapters import LoraAdapters
from penstock_frontend.api.openai.models import Models
from penstock_frontend.api.openai.pooling.classification import Classifications
from penstock_frontend.api.openai.pooling.pooled import Pooling
from penstock_frontend.api.openai.pooling.reranking import Reranking
from penstock_frontend.api.openai.pooling.scores import Scores
from penstock_frontend.api.openai.responses.creating import ResponseCreation
from penstock_frontend.api.openai.responses.response_store import ResponseStore
from penstock_frontend.api.openai.responses.stored import StoredResponses
from penstock_frontend.api.openai.tokenization import Tokenization
from penstock_frontend.api.openai.version import version
from penstock_frontend.async_llm import AsyncLLM
from penstock_frontend.chat_calls import ChatCalls
from penstock_frontend.config import FrontendConfig, LimitsConfig
from penstock_frontend.scoring_calls import ScoringCalls

_RESPONSE = "/v1/responses/{response_id}"


def routes(
    llm: AsyncLLM,
    chat: ChatCalls,
    config: FrontendConfig,
    limits: Reread[LimitsConfig],
    labels: Sequence[str],
    *,
    gate: Gate,
    bodies: Bodies,
) -> Sequence[Route]:
    """All of them. ``labels``: names of the model's classes, in order; ``gate`` and ``bodies``: of all calls of the listener."""
    scoring = ScoringCalls(llm)
    models, tokenization = Models(llm, config.model), Tokenization(llm, chat)
    scores, reranking = Scores(llm, scoring), Reranking(llm, scoring)
    store = ResponseStore(config.http.responses)
    stored = StoredResponses(store)
    posts: dict[str, Handler] = {
        "/v1/responses": ResponseCreation(llm, chat, store),
        f"{_RESPONSE}/cancel": stored.cancel,
        "/v1/completions": Completions(llm, limits=limits),
        "/v1/chat/completions": ChatCompletions(llm, chat),
        "/v1/embeddings": Embeddings(llm, chat),
        "/v1/score": scores,
        "/score": scores,
        "/v1/rerank": reranking,
        "/v2/rerank": reranking,
        "/rerank": reranking,
        "/classify": Classifications(llm, labels=labels),
        "/pooling": Pooling(llm),
        "/tokenize": tokenization.tokenize,
        "/detokenize": tokenization.detokenize,
    }
    if config.lora.http_loading:
        loading = LoraAdapters(llm.adapters)
        posts |= {lora_adapters.LOAD: loading.load, lora_adapters.UNLOAD: loading.unload}
    gets: dict[str, Handler] = {
        "/v1/models": models.list,
        "/v1/models/{name:path}": models.get,
        "/version": version,
        _RESPONSE: stored.get,
        f"{_RESPONSE}/input_items": stored.items,
    }
    return [
        *(Route(path, Endpoint(gate, bodies, handler), methods=["POST"]) for path, handler in posts.items()),
        *(Route(path, Endpoint(gate, bodies, handler), methods=["GET"]) for path, handler in gets.items()),
        Route(_RESPONSE, Endpoint(gate, bodies, stored.delete), methods=["DELETE"]),
    ]


async def _on_http_error(request: Request, error: Exception) -> Response:
    """A path or a method that nothing serves."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    off = ": lora.http_loading is false" if request.url.path in lora_adapters.PATHS else ""
    message = {404: f"there is no {request.url.path}{off}", 405: f"{request.url.path} does not serve {request.method}"}
    code = {404: "path_not_found", 405: "method_not_allowed"}
    failure = errors.HttpError(status, message.get(status, f"HTTP {status}"), code.get(status, "http_error"))
    shape = anthropic.answer if anthropic.is_anthropic(request.url.path) else errors.answer
    answer = shape(failure, request.headers.get(REQUEST_ID, ""))
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return Response(answer.body, status, {**headers, **answer.headers}, "application/json")


EXCEPTION_HANDLERS: Mapping[Any, Any] = {HTTPException: _on_http_error}
"""For the Starlette application that the routes are put in."""
