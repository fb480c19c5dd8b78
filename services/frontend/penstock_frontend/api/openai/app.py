"""Routes of the OpenAI API, and errors for paths that are not known."""

from collections.abc import Callable, Mapping, Sequence
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
from penstock_frontend.api.http.model_switch import for_each_model
from penstock_frontend.api.http.request_body import Bodies
from penstock_frontend.api.openai import errors
from penstock_frontend.api.openai.audio.transcriptions import Transcriptions, form_names, refuse_text
from penstock_frontend.api.openai.chat_completions import ChatCompletions
from penstock_frontend.api.openai.completions import Completions
from penstock_frontend.api.openai.models import (
    LOAD,
    PATHS,
    UNLOAD,
    LoraAdapters,
    Models,
    names_to_load,
    names_to_unload,
    version,
)
from penstock_frontend.api.openai.pooling import tei
from penstock_frontend.api.openai.pooling.cohere import CohereEmbed
from penstock_frontend.api.openai.pooling.embeddings import Embeddings
from penstock_frontend.api.openai.pooling.pooled import Classifications, Pooling
from penstock_frontend.api.openai.pooling.scoring import Reranking, Scores
from penstock_frontend.api.openai.responses.create_response import ResponseCreation
from penstock_frontend.api.openai.responses.response_store import ResponseStore, StoredResponses
from penstock_frontend.api.openai.tokenization import Tokenization
from penstock_frontend.config import HttpConfig, LimitsConfig
from penstock_frontend.served_models import ServedModel, ServedModels

_RESPONSE = "/v1/responses/{response_id}"


def routes(
    models: ServedModels, config: HttpConfig, limits: Reread[LimitsConfig], *, gate: Gate, bodies: Bodies
) -> Sequence[Route]:
    """Return all routes of the OpenAI API. All calls of the listener share ``gate`` and ``bodies``."""
    listed, store = Models(models), ResponseStore(config.responses)
    stored = StoredResponses(store)
    posts: dict[str, Handler] = {f"{_RESPONSE}/cancel": stored.cancel}
    posts |= {path: for_each_model(models, make) for path, make in _makers(limits, store).items()}
    posts["/v1/audio/transcriptions"] = for_each_model(models, lambda model: _audio(model).transcribe, form_names)
    posts["/v1/audio/translations"] = for_each_model(models, lambda model: _audio(model).translate, form_names)
    if any(model.lora.http_loading for model in models):
        posts[LOAD] = for_each_model(models, lambda model: LoraAdapters(model).load, names_to_load)
        posts[UNLOAD] = for_each_model(models, lambda model: LoraAdapters(model).unload, names_to_unload)
    gets: dict[str, Handler] = {
        "/version": version,
        _RESPONSE: stored.get,
        f"{_RESPONSE}/input_items": stored.items,
    }
    theirs = AnthropicModels(listed)
    both = {
        path: (Endpoint(gate, bodies, ours), Endpoint(gate, bodies, of_anthropic, anthropic.answer))
        for path, ours, of_anthropic in (
            ("/v1/models", listed.list, theirs.list),
            ("/v1/models/{name:path}", listed.get, theirs.get),
        )
    }
    return [
        *(Route(path, Endpoint(gate, bodies, handler), methods=["POST"]) for path, handler in posts.items()),
        *(Route(path, Endpoint(gate, bodies, handler), methods=["GET"]) for path, handler in gets.items()),
        *(Route(path, _ByProtocol(*endpoints), methods=["GET"]) for path, endpoints in both.items()),
        Route(_RESPONSE, Endpoint(gate, bodies, stored.delete), methods=["DELETE"]),
    ]


def _makers(limits: Reread[LimitsConfig], store: ResponseStore) -> Mapping[str, Callable[[ServedModel], Handler]]:
    """Return the paths of calls whose body names a model, each with a function that creates the handler of a model."""

    def scores(model: ServedModel) -> Handler:
        return Scores(model.llm, model.scoring)

    def reranking(model: ServedModel) -> Handler:
        return Reranking(model.llm, model.scoring)

    def generating(make: Callable[[ServedModel], Handler]) -> Callable[[ServedModel], Handler]:
        return lambda model: make(model) if model.speech is None else refuse_text

    return {
        "/v1/responses": generating(lambda model: ResponseCreation(model.llm, model.chat, store)),
        "/v1/completions": generating(lambda model: Completions(model.llm, limits=limits)),
        "/v1/chat/completions": generating(lambda model: ChatCompletions(model.llm, model.chat)),
        "/v1/embeddings": lambda model: Embeddings(model.llm, model.chat),
        "/v1/score": scores,
        "/score": scores,
        "/v1/rerank": reranking,
        "/v2/rerank": reranking,
        "/rerank": reranking,
        "/classify": lambda model: Classifications(model.llm, labels=model.labels),
        "/pooling": lambda model: Pooling(model.llm),
        "/v2/embed": lambda model: CohereEmbed(model.llm),
        "/embed": lambda model: tei.Embed(model.llm),
        "/embed_all": lambda model: tei.EmbedAll(model.llm),
        "/embed_sparse": lambda model: tei.EmbedSparse(model.llm),
        "/predict": lambda model: tei.Predict(model.llm, labels=model.labels),
        "/similarity": lambda model: tei.Similarity(model.llm, model.scoring),
        "/tokenize": lambda model: Tokenization(model.llm, model.chat).tokenize,
        "/detokenize": lambda model: Tokenization(model.llm, model.chat).detokenize,
    }


def _audio(model: ServedModel) -> Transcriptions:
    return Transcriptions(model.llm, model.speech)


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
