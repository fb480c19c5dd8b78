"""Server of the real web page and its ``/cluster``, with an API whose streamed answers a test sets."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock_common.types.cluster import EngineState, EngineStatus
from penstock_frontend.api.http.form_data import FormReader, Part, values_of
from penstock_frontend.api.http.page import Page, PageModel
from penstock_frontend.api.http.server import HttpServer, make_app
from penstock_frontend.api.openai.audio.transcriptions import TranscriptionBody
from penstock_frontend.config import HttpConfig
from penstock_frontend.interfaces import ModelLimits

HOLD = "<hold>"
"""Piece at which the stream waits until ``go_on`` is set or the client disconnects."""
THOUGHT = "<thought>"
CUT = "<cut>"
"""Piece at which the connection is closed without a message."""


class PageServer:
    """Server of the web page with fake answers: ``async with PageServer()``. Its address is ``url``.

    Attributes:
        pieces: Texts of the next answers. A text that begins with THOUGHT is reasoning, a mapping is a chat delta.
        refusal: Status and error to answer with instead.
        broken: Error in the stream after the pieces.
        vectors: The next embeddings.
        requests: Received bodies.
        abandoned: Set when a client leaves a stream. engines, missing, serving, capabilities, limits: State of the
            cluster.
    """

    def __init__(
        self, *, chat: bool = True, tools: bool = True, media: Sequence[str] = (), speech: bool = False, port: int = 0
    ) -> None:
        self.pieces: Sequence[str | dict[str, Any]] = (" a", " b", " c")
        self.refusal: tuple[int, dict[str, Any], dict[str, str]] | None = None
        self.broken: dict[str, Any] | None = None
        self.vectors: Sequence[Sequence[float]] = ()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.go_on = asyncio.Event()
        self.abandoned = asyncio.Event()
        self.engines = [EngineStatus(engine_id="engine-0", incarnation="1", address="127.0.0.1:50052")]
        self.missing: list[str] = []
        self.serving = True
        self.capabilities: Sequence[str] = ("generate",)
        self.limits: ModelLimits | None = ModelLimits(2048, 4096)
        model = PageModel(
            name="tiny",
            engines=self,  # type: ignore[arg-type]  # the part of an EngineView that the page asks
            chat=chat,
            tools=tools,
            media=media,
            speech=speech,
            serving=lambda: self.serving,
            coordinator=lambda: "connected",
            missing=lambda: self.missing,
        )
        page = Page([model])
        api = [Route(path, self._complete, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")]
        api.append(Route("/v1/embeddings", self._embed, methods=["POST"]))
        api += [
            Route(f"/v1/audio/{task}", self._transcribe, methods=["POST"])
            for task in ("transcriptions", "translations")
        ]
        app = make_app(CollectorRegistry(), lambda: "" if self.serving else "no engine", [*page.routes(), *api])
        self._http = HttpServer(HttpConfig(host="127.0.0.1", port=port), app)

    @property
    def port(self) -> int:
        return self._http.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def __aenter__(self) -> "PageServer":
        await self._http.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop the server. Idempotent."""
        self.go_on.set()
        await self._http.stop()

    def set_engine(self, **fields: Any) -> None:
        """Change fields of the only engine, e.g. ``state=EngineState.DRAINING``."""
        known = {name: getattr(self.engines[0], name) for name in EngineStatus.__struct_fields__}
        self.engines = [EngineStatus(**known | fields)]

    def lose_engines(self) -> None:
        """Make the engines stop accepting requests."""
        self.serving, self.limits, self.capabilities = False, None, ()
        self.set_engine(state=EngineState.DEAD)

    def cluster(self) -> Sequence[EngineStatus]:
        """Return the engines that the page shows."""
        return self.engines

    async def _complete(self, request: Request) -> Response:
        self.requests.append((request.url.path, await request.json()))
        if self.refusal is not None:
            status, error, headers = self.refusal
            return JSONResponse({"error": error}, status_code=status, headers=headers)
        return StreamingResponse(self._stream(chat="chat" in request.url.path), media_type="text/event-stream")

    async def _embed(self, request: Request) -> Response:
        self.requests.append((request.url.path, await request.json()))
        if self.refusal is not None:
            status, error, headers = self.refusal
            return JSONResponse({"error": error}, status_code=status, headers=headers)
        data = [{"object": "embedding", "index": i, "embedding": list(v)} for i, v in enumerate(self.vectors)]
        return JSONResponse({"data": data, "model": "tiny", "usage": {"prompt_tokens": 7, "total_tokens": 7}})

    async def _transcribe(self, request: Request) -> Response:
        body = b"".join([part async for part in request.stream()])
        parts = values_of(_parsed(request.headers["content-type"], body), TranscriptionBody)
        self.requests.append((request.url.path, parts))
        if self.refusal is not None:
            status, error, headers = self.refusal
            return JSONResponse({"error": error}, status_code=status, headers=headers)
        return StreamingResponse(self._speak(), media_type="text/event-stream")

    def _speak(self) -> AsyncIterator[str]:
        text = "".join(piece for piece in self.pieces if isinstance(piece, str) and piece != HOLD)
        return self._events(
            lambda piece: event(type="transcript.text.delta", delta=piece),
            [event(type="transcript.text.done", text=text.strip(), usage={"type": "duration", "seconds": 3})],
        )

    def _stream(self, *, chat: bool) -> AsyncIterator[str]:
        count = len(self.pieces)
        usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
        return self._events(
            lambda piece: event(choices=[{"index": 0, "finish_reason": None, **content(piece, chat=chat)}]),
            [
                event(choices=[{"index": 0, "finish_reason": "length", **content("", chat=chat)}]),
                event(choices=[], usage=usage | {"prompt_tokens_details": {"cached_tokens": 4}}),
                "data: [DONE]\n\n",
            ],
        )

    async def _events(self, form: Callable[[str | dict[str, Any]], str], ends: Sequence[str]) -> AsyncIterator[str]:
        """Yield an event for each piece, in the given form, and then ``ends``, or an error in place of ``ends``."""
        try:
            for piece in self.pieces:
                if piece == HOLD:
                    await self.go_on.wait()
                elif piece == CUT:
                    return
                else:
                    yield form(piece)
            if self.broken is not None:
                yield event(error=self.broken)
                return
            for end in ends:
                yield end
        except asyncio.CancelledError:
            self.abandoned.set()
            raise


def _parsed(content_type: str, body: bytes) -> list[Part]:
    reader = FormReader(content_type, ("file",))
    reader.feed(body)
    return reader.finish()


def content(text: str | dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """Return a piece in the form of a choice in chat completions or completions."""
    if isinstance(text, dict):
        return {"delta": text}
    if text.startswith(THOUGHT):
        return {"delta": {"reasoning_content": text.removeprefix(THOUGHT)}}
    return {"delta": {"content": text}} if chat else {"text": text}


def event(**fields: Any) -> str:
    """Return one server-sent event."""
    return f"data: {json.dumps({'id': 'cmpl-1', 'model': 'tiny', **fields})}\n\n"
