"""``/openapi.json``: OpenAPI document of all HTTP APIs, generated from their structs."""

import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock_frontend.api.anthropic.errors import MessagesError
from penstock_frontend.api.anthropic.protocol import (
    AssistantMessage,
    ConversationBody,
    MessagesBody,
    StreamEvent,
    TokenCount,
)
from penstock_frontend.api.http.endpoint import PLAIN_TEXT
from penstock_frontend.api.http.form_data import MEDIA_TYPE, file_fields
from penstock_frontend.api.http.page import ClusterState
from penstock_frontend.api.openai.audio.answers import (
    TextDeltaEvent,
    TextDoneEvent,
    TranscribedText,
    VerboseTranscription,
)
from penstock_frontend.api.openai.audio.transcriptions import SpeechFields, TranscriptionBody, TranslationBody
from penstock_frontend.api.openai.chat_completions import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from penstock_frontend.api.openai.completions import Completion, CompletionRequest
from penstock_frontend.api.openai.errors import ErrorBody
from penstock_frontend.api.openai.models import (
    LOAD,
    UNLOAD,
    LoadLoraAdapterRequest,
    Model,
    ModelList,
    UnloadLoraAdapterRequest,
    Version,
)
from penstock_frontend.api.openai.pooling import tei
from penstock_frontend.api.openai.pooling.cohere import CohereEmbedBody, CohereEmbeddings
from penstock_frontend.api.openai.pooling.embeddings import EmbeddingList, EmbeddingRequest
from penstock_frontend.api.openai.pooling.pooled import ClassificationBody, ClassificationList, PooledList, PoolingBody
from penstock_frontend.api.openai.pooling.scoring import RankedText, Ranking, RerankBody, ScoreBody, ScoreList
from penstock_frontend.api.openai.response_format import ResponseFormat
from penstock_frontend.api.openai.responses import response
from penstock_frontend.api.openai.responses.response import Event, ResponseBody
from penstock_frontend.api.openai.tokenization import DetokenizeRequest, Text, TokenizeRequest, Tokens

PATH = "/openapi.json"
_ERRORS = {
    "400": "A field is invalid or not supported.",
    "401": "Credentials are missing or wrong.",
    "403": "The caller lacks the permission.",
    "404": "The model does not exist.",
    "408": "The body did not arrive within http.body_timeout.",
    "413": "The body is larger than http.max_body_bytes.",
    "415": "The body has a type or an encoding that is not supported.",
    "429": "A limit on requests in flight is reached.",
    "529": "No engine accepts requests.",
    "503": "No engine accepts requests.",
    "504": "The timeout in x-request-timeout has passed.",
}
_REF = "#/components/schemas/{name}"
_UNTYPED = {"default": None}
"""Schema of a field that is refused whatever its value is. The OpenAPI document leaves such fields out."""


class _Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path. ``answer`` is a struct or the type of a list. ``other`` is another struct that the answer may
    be. ``chunk`` is the type of a streamed chunk. ``text`` is the media type of an answer that is not JSON, or that can
    also be text. ``is_form`` tells whether the body is a form with files instead of JSON.
    """

    summary: str
    body: type | None = None
    answer: Any = None
    other: type | None = None
    chunk: type | None = None
    text: str = ""
    errors: tuple[str, ...] = ()
    error: type = ErrorBody
    is_form: bool = False


_CALL = ("400", "404", "408", "413", "429", "503", "504")
_MESSAGE_CALL = ("400", "404", "408", "413", "429", "504", "529")
_OPERATION = ("400", "401", "403", "404", "408", "413", "429", "503")
_LOOK = ("400", "408", "413", "429")
_FORM_CALL = (*_CALL, "415")
_SCORE = _Operation(summary="Score pairs of texts", body=ScoreBody, answer=ScoreList, errors=_CALL)
_RERANK = _Operation(
    summary="Rank documents by relevance", body=RerankBody, answer=Ranking | list[RankedText], errors=_CALL
)


def _speech(summary: str, body: type[SpeechFields]) -> _Operation:
    """Return the operation of a route for audio files."""
    return _Operation(
        summary=summary,
        body=body,
        answer=TranscribedText,
        other=VerboseTranscription,
        chunk=TextDeltaEvent,
        text=PLAIN_TEXT,
        errors=_FORM_CALL,
        is_form=True,
    )


_POSTS: Mapping[str, _Operation] = {
    "/v1/completions": _Operation(
        summary="Continue prompts", body=CompletionRequest, answer=Completion, chunk=Completion, errors=_CALL
    ),
    "/v1/chat/completions": _Operation(
        summary="Continue a conversation",
        body=ChatCompletionRequest,
        answer=ChatCompletion,
        chunk=ChatCompletionChunk,
        errors=_CALL,
    ),
    "/v1/messages": _Operation(
        summary="Continue a conversation, in Anthropic's protocol",
        body=MessagesBody,
        answer=AssistantMessage,
        chunk=StreamEvent,
        errors=_MESSAGE_CALL,
        error=MessagesError,
    ),
    "/v1/messages/count_tokens": _Operation(
        summary="Count the tokens of a conversation",
        body=ConversationBody,
        answer=TokenCount,
        errors=_MESSAGE_CALL,
        error=MessagesError,
    ),
    "/v1/responses": _Operation(
        summary="Continue a conversation", body=ResponseBody, answer=response.Response, chunk=Event, errors=_CALL
    ),
    "/v1/responses/{response_id}/cancel": _Operation(
        summary="Cancel a response in progress", answer=response.Response, errors=("404", *_LOOK)
    ),
    "/v1/embeddings": _Operation(
        summary="Compute embeddings of inputs", body=EmbeddingRequest, answer=EmbeddingList, errors=_CALL
    ),
    "/v1/audio/transcriptions": _speech("Transcribe an audio file", TranscriptionBody),
    "/v1/audio/translations": _speech("Translate the speech of an audio file to English", TranslationBody),
    "/v1/score": _SCORE,
    "/score": _SCORE,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/rerank": _RERANK,
    "/classify": _Operation(
        summary="Classify inputs", body=ClassificationBody, answer=ClassificationList, errors=_CALL
    ),
    "/pooling": _Operation(summary="Run a pooling model on inputs", body=PoolingBody, answer=PooledList, errors=_CALL),
    "/v2/embed": _Operation(
        summary="Compute embeddings, as in Cohere's API", body=CohereEmbedBody, answer=CohereEmbeddings, errors=_CALL
    ),
    "/embed": _Operation(
        summary="Compute embeddings, as in TEI", body=tei.EmbedBody, answer=list[list[float]], errors=_CALL
    ),
    "/embed_all": _Operation(
        summary="Compute embeddings of all tokens, as in TEI",
        body=tei.EmbedAllBody,
        answer=list[list[list[float]]],
        errors=_CALL,
    ),
    "/embed_sparse": _Operation(
        summary="Compute sparse embeddings, as in TEI",
        body=tei.EmbedAllBody,
        answer=list[list[tei.SparseEntry]],
        errors=_CALL,
    ),
    "/predict": _Operation(
        summary="Classify inputs, as in TEI",
        body=tei.PredictBody,
        answer=list[tei.Prediction | list[tei.Prediction]],
        errors=_CALL,
    ),
    "/similarity": _Operation(
        summary="Compare sentences, as in TEI", body=tei.SimilarityBody, answer=list[float], errors=_CALL
    ),
    "/ping": _Operation(summary="Report whether requests are accepted", text="text/plain", errors=("503",)),
    LOAD: _Operation(
        summary="Load a LoRA adapter under a name", body=LoadLoraAdapterRequest, text=PLAIN_TEXT, errors=_OPERATION
    ),
    UNLOAD: _Operation(
        summary="Remove the name of a LoRA adapter",
        body=UnloadLoraAdapterRequest,
        text=PLAIN_TEXT,
        errors=_OPERATION,
    ),
    "/tokenize": _Operation(summary="Convert a text to token ids", body=TokenizeRequest, answer=Tokens, errors=_CALL),
    "/detokenize": _Operation(summary="Convert token ids to a text", body=DetokenizeRequest, answer=Text, errors=_CALL),
}
_GETS: Mapping[str, _Operation] = {
    "/v1/models": _Operation(summary="List the models", answer=ModelList, errors=_LOOK),
    "/v1/responses/{response_id}": _Operation(
        summary="Return a stored response", answer=response.Response, errors=("404", *_LOOK)
    ),
    "/v1/responses/{response_id}/input_items": _Operation(
        summary="Return the input items of a stored response", answer=response.ItemList, errors=("404", *_LOOK)
    ),
    "/v1/models/{name}": _Operation(summary="Return one model", answer=Model, errors=("404", *_LOOK)),
    "/version": _Operation(summary="Return the version of the frontend", answer=Version, errors=_LOOK),
    "/ping": _Operation(summary="Report whether requests are accepted", text="text/plain", errors=("503",)),
    "/health": _Operation(summary="Report whether requests are accepted", text="text/plain", errors=("503",)),
    "/metrics": _Operation(summary="Metrics for Prometheus", text="text/plain"),
    "/": _Operation(summary="Web page", text="text/html"),
    "/cluster": _Operation(summary="State of the engines for the web page", answer=ClusterState),
    PATH: _Operation(summary="This document", text="application/json"),
}


_DELETES: Mapping[str, _Operation] = {
    "/v1/responses/{response_id}": _Operation(
        summary="Delete a stored response", answer=response.DeletedResponse, errors=("404", *_LOOK)
    ),
}
_METHODS = {"post": _POSTS, "get": _GETS, "delete": _DELETES}
_PARAMETER = re.compile(r"{(\w+)}")


def document(paths: frozenset[str]) -> dict[str, Any]:
    """Return the OpenAPI document of ``paths``. The document leaves out paths that this module does not describe."""
    described: dict[str, dict[str, Any]] = {}
    for method, operations in _METHODS.items():
        for path, each in operations.items():
            if path in paths:
                described.setdefault(path, {})[method] = _operation(path, each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": importlib.metadata.version("penstock-frontend")},
        "paths": described,
        "components": {"schemas": _schemas()},
    }


def route(routes: list[Route]) -> Route:
    """Return a route that serves the OpenAPI document. The document describes ``routes`` and this route itself."""
    paths = frozenset(each.path.replace(":path}", "}") for each in routes) | {PATH}
    content = msgspec.json.encode(document(paths))

    async def answer(_: Request) -> Response:
        return Response(content, media_type="application/json")

    return Route(PATH, answer)


def _operation(path: str, each: _Operation) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"} if each.text.startswith("text/") else {}
    content = {each.text: {"schema": schema}} if each.text else {}
    if each.answer is not None or not each.text:
        answer = _answer(each.answer)
        content["application/json"] = {"schema": {"anyOf": [answer, _ref(each.other)]} if each.other else answer}
    if each.chunk is not None:
        # Each event is a chunk as JSON, or an error.
        last = f"a {TextDoneEvent.__name__}" if each.is_form else "[DONE]"
        about = f"An event; its data is a {each.chunk.__name__}, the last one's {last}."
        event: dict[str, Any] = {"type": "object", "description": about, "properties": {"data": {"type": "string"}}}
        content["text/event-stream"] = {"schema": event}
    errors = {"application/json": {"schema": _ref(each.error)}} if each.text != "text/plain" else content
    responses = {code: {"description": _ERRORS[code], "content": errors} for code in each.errors}
    described: dict[str, Any] = {
        "summary": each.summary,
        "responses": {"200": {"description": each.summary + ".", "content": content}, **responses},
    }
    if each.body is not None:
        body = {MEDIA_TYPE if each.is_form else "application/json": {"schema": _ref(each.body)}}
        described["requestBody"] = {"required": True, "content": body}
    if names := _PARAMETER.findall(path):
        string = {"type": "string"}
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": string} for name in names]
    return described


def _answer(kind: Any) -> dict[str, Any]:
    """Return the schema of an answer: a reference to a struct, or the schema of a list."""
    if kind is None or isinstance(kind, type):
        return _ref(kind)
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


def _ref(kind: type | None) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__ if kind else "")}


def _schemas() -> dict[str, Any]:
    kinds: list[Any] = [ErrorBody, MessagesError, ResponseFormat, TextDoneEvent]
    for each in (operation for operations in _METHODS.values() for operation in operations.values()):
        kinds += [kind for kind in (each.body, each.answer, each.other, each.chunk) if kind is not None]
    _, schemas = msgspec.json.schema_components(list(dict.fromkeys(kinds)), ref_template=_REF)
    for each in _POSTS.values():
        properties = schemas[each.body.__name__]["properties"] if each.body is not None else {}
        for name in [name for name, schema in properties.items() if schema == _UNTYPED]:
            del properties[name]
    for each in _POSTS.values():
        if each.is_form and each.body is not None:
            for name in file_fields(each.body):
                schemas[each.body.__name__]["properties"][name] = {"type": "string", "format": "binary"}
    for kind in (CompletionRequest, ChatCompletionRequest, ResponseBody):
        properties = schemas[kind.__name__]["properties"]
        properties["response_format"] = {"anyOf": [_ref(ResponseFormat), {"type": "null"}]}
    return schemas
