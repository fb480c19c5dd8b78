"""Routes of the OpenAI API, and errors for paths that are not known."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from penstock_common.config.settings import Reread
from penstock_common.errors import nearest
from penstock_frontend.api.anthropic import errors as anthropic
from penstock_frontend.api.anthropic.models import AnthropicModels
from penstock_frontend.api.http.endpoint import REQUEST_ID, Endpoint, Gate, Handler, id_headers
from penstock_frontend.api.http.request_body import Bodies
from penstock_frontend.api.openai import errors
from penstock_frontend.api.openai.audio.transcriptions import Transcriptions, refuse_text
from penstock_frontend.api.openai.chat_completions import ChatCompletions
from penstock_frontend.api.openai.completions import Completions
from penstock_frontend.api.openai.models import LOAD, PATHS, UNLOAD, LoraAdapters, Models, version
from penstock_frontend.api.openai.pooling import tei
from penstock_frontend.api.openai.pooling.cohere import CohereEmbed
from penstock_frontend.api.openai.pooling.embeddings import Embeddings
from penstock_frontend.api.openai.pooling.pooled import Classifications, Pooling
from penstock_frontend.api.openai.pooling.scoring import Reranking, Scores
from penstock_frontend.api.openai.responses.create_response import ResponseCreation
from penstock_frontend.api.openai.responses.response_store import ResponseStore, StoredResponses
from penstock_frontend.api.openai.tokenization import Tokenization
from penstock_frontend.calls.chat import ChatCalls
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.calls.scoring import ScoringCalls
from penstock_frontend.config import FrontendConfig, LimitsConfig
from penstock_frontend.speech.types import Speech

_RESPONSE = "/v1/responses/{response_id}"
_GENERATING = ("/v1/responses", "/v1/completions", "/v1/chat/completions")
"""Routes that generate text."""


def routes(
    llm: AsyncLLM,
    chat: ChatCalls,
    config: FrontendConfig,
    limits: Reread[LimitsConfig],
    labels: Sequence[str],
    scoring: ScoringCalls,
    speech: Speech | None,
    *,
    gate: Gate,
    bodies: Bodies,
) -> Sequence[Route]:
    """Return all routes of the OpenAI API.

    ``labels`` are the names of the model's classes, in the order of the class indices. ``speech`` is None if the model
    does not transcribe. All calls of the listener share
    ``gate`` and ``bodies``.
    """
    models, tokenization = Models(llm, config.model), Tokenization(llm, chat)
    scores, reranking = Scores(llm, scoring), Reranking(llm, scoring)
    store = ResponseStore(config.http.responses)
    stored = StoredResponses(store)
    audio = Transcriptions(llm, speech)
    posts: dict[str, Handler] = {
        "/v1/responses": ResponseCreation(llm, chat, store),
        f"{_RESPONSE}/cancel": stored.cancel,
        "/v1/completions": Completions(llm, limits=limits),
        "/v1/chat/completions": ChatCompletions(llm, chat),
        "/v1/embeddings": Embeddings(llm, chat),
        "/v1/audio/transcriptions": audio.transcribe,
        "/v1/audio/translations": audio.translate,
        "/v1/score": scores,
        "/score": scores,
        "/v1/rerank": reranking,
        "/v2/rerank": reranking,
        "/rerank": reranking,
        "/classify": Classifications(llm, labels=labels),
        "/pooling": Pooling(llm),
        "/v2/embed": CohereEmbed(llm),
        "/embed": tei.Embed(llm),
        "/embed_all": tei.EmbedAll(llm),
        "/predict": tei.Predict(llm, labels=labels),
        "/similarity": tei.Similarity(llm, scoring),
        "/tokenize": tokenization.tokenize,
        "/detokenize": tokenization.detokenize,
    }
    if speech is not None:
        posts |= dict.fromkeys(_GENERATING, refuse_text)
    if config.lora.http_loading:
        loading = LoraAdapters(llm.adapters)
        posts |= {LOAD: loading.load, UNLOAD: loading.unload}
    gets: dict[str, Handler] = {
        "/version": version,
        _RESPONSE: stored.get,
        f"{_RESPONSE}/input_items": stored.items,
    }
    theirs = AnthropicModels(llm, models)
    both = {
        path: (Endpoint(gate, bodies, ours), Endpoint(gate, bodies, of_anthropic, anthropic.answer))
        for path, ours, of_anthropic in (
            ("/v1/models", models.list, theirs.list),
            ("/v1/models/{name:path}", models.get, theirs.get),
        )
    }
    return [
        *(Route(path, Endpoint(gate, bodies, handler), methods=["POST"]) for path, handler in posts.items()),
        *(Route(path, Endpoint(gate, bodies, handler), methods=["GET"]) for path, handler in gets.items()),
        *(Route(path, _ByProtocol(*endpoints), methods=["GET"]) for path, endpoints in both.items()),
        Route(_RESPONSE, Endpoint(gate, bodies, stored.delete), methods=["DELETE"]),
    ]


class _ByProtocol:
    """Application for a path that exists in OpenAI's and in Anthropic's protocol. The application answers in the
    protocol of the client.
    """

    def __init__(self, openai: Endpoint, anthropic_: Endpoint) -> None:
        self._openai = openai
        self._anthropic = anthropic_

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call in the protocol of the client."""
        endpoint = self._anthropic if anthropic.is_anthropic(scope) else self._openai
        await endpoint(scope, receive, send)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Return the error for a path or method that is not known."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = request.url.path
    off = ": lora.http_loading is false" if path in PATHS else _hint(path, request.app.routes)
    message = {404: f"there is no {path}{off}", 405: f"{path} does not support the method {request.method}"}
    code = {404: "path_not_found", 405: "method_not_allowed"}
    failure = errors.HttpError(status, message.get(status, f"HTTP {status}"), code.get(status, "http_error"))
    shape = anthropic.answer if anthropic.is_anthropic(request.scope) else errors.answer
    ids = id_headers(request.headers)
    answer = shape(failure, ids[REQUEST_ID])
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return Response(answer.body, status, {**headers, **answer.headers, **ids}, "application/json")


def _hint(path: str, routes: Sequence[BaseRoute]) -> str:
    """Return a hint with the known path that contains ``path``, or that ``path`` contains. Such paths are a common
    mistake, because clients append a path to their base_url. If there is no such path, return a hint with the most
    similar known path.
    """
    known = [route.path for route in routes if isinstance(route, Route) and route.path.startswith("/v1/")]
    known = [each for each in known if "{" not in each]
    longer, shorter = [each for each in known if each.endswith(path)], [each for each in known if each in path]
    if path == "/":
        return ""
    if not (longer or shorter):
        return nearest(path, known, _SIMILAR)
    best = max(shorter, key=len) if shorter else min(longer, key=len)
    remedy = "without /v1, for an Anthropic client" if best.startswith(anthropic.PREFIX) else "with /v1 appended once"
    return f"; did you mean {best}? Set the client's base_url to the server's address {remedy}"


_SIMILAR = 0.8
"""Minimum similarity of a path in a hint. Other paths may belong to parts of OpenAI's API that are not served."""
EXCEPTION_HANDLERS: Mapping[Any, Any] = {HTTPException: _on_http_error}
"""Exception handlers for the Starlette application that serves the routes."""
