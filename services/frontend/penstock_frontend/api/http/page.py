"""Web page at ``/`` with a playground and the state of the cluster. The page reads this state from ``/cluster``."""

import importlib.resources
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock_common.errors import NotFound, quoted
from penstock_common.types.cluster import EngineStatus
from penstock_frontend.api.openai import errors
from penstock_frontend.interfaces import EngineView

_HEADERS = {
    "Cache-Control": "no-cache",
    # The page is one file that contains its script and its style. The page loads no other file, and other web pages
    # must not show this page in a frame.
    "Content-Security-Policy": (
        "default-src 'self' 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one engine in the answer of ``/cluster``.

    ``kv_cache_usage`` is a fraction from 0 to 1. ``id`` is empty until the frontend has reached the engine.
    """

    id: str
    address: str
    state: str
    rank: int
    running: int
    waiting: int
    kv_cache_usage: float


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/cluster``: the state of the cluster, as this frontend knows it.

    Attributes:
        model: the model's name.
        models: names of all models of this frontend. The query parameter ``model`` of ``/cluster`` chooses.
        capabilities: names of the capabilities of the engines.
        chat: whether the model has a chat template.
        tools: whether requests for conversations may have tools.
        media: modalities that the model accepts in addition to text.
        speech: whether the model transcribes audio files.
        serving: whether the frontend accepts requests now.
        max_model_len: maximum number of tokens of prompt and output together. 0 while no engine is connected.
        coordinator: ``connected``, ``disconnected``, or ``none`` without a coordinator.
        engines: state of each engine.
        missing_engines: ids of lost engines that have not returned.
    """

    model: str
    models: list[str]
    capabilities: list[str]
    chat: bool
    tools: bool
    media: list[str]
    speech: bool
    serving: bool
    max_model_len: int
    coordinator: str
    engines: list[EngineState]
    missing_engines: list[str]


class PageModel(NamedTuple):
    """A model on the page. The fields without a comment are those of ``ClusterState``."""

    name: str
    engines: EngineView
    chat: bool
    tools: bool
    media: Collection[str]
    speech: bool
    serving: Callable[[], bool]
    coordinator: Callable[[], str]
    missing: Callable[[], list[str]]
    """Returns the ids of lost engines that have not returned."""


class Page:
    """Handler of the web page, and of ``/cluster`` with the state that the page shows."""

    def __init__(self, models: Sequence[PageModel]) -> None:
        self._models = {model.name: model for model in models}
        self._html = importlib.resources.files("penstock_frontend").joinpath("page/index.html").read_bytes()

    def routes(self) -> list[Route]:
        """Return the routes of the page for the HTTP application."""
        return [Route("/", self._index), Route("/cluster", self._cluster)]

    def state(self, name: str = "") -> ClusterState:
        """Return the answer of ``/cluster`` for the model with this name, or for the first model. Raises NotFound."""
        model = self._models.get(name or next(iter(self._models)))
        if model is None:
            raise NotFound(f"model is {quoted(name)}; known: {', '.join(self._models)}", field="model")
        limits = model.engines.limits
        return ClusterState(
            model=model.name,
            models=list(self._models),
            capabilities=list(model.engines.capabilities),
            chat=model.chat,
            tools=model.tools,
            media=sorted(model.media),
            speech=model.speech,
            serving=model.serving(),
            max_model_len=limits.max_model_len if limits else 0,
            coordinator=model.coordinator(),
            engines=[_engine_state(status) for status in model.engines.cluster()],
            missing_engines=model.missing(),
        )

    async def _index(self, _: Request) -> Response:
        return Response(self._html, media_type="text/html", headers=_HEADERS)

    async def _cluster(self, request: Request) -> Response:
        try:
            status, answer = 200, msgspec.json.encode(self.state(request.query_params.get("model", "")))
        except NotFound as e:
            error = errors.answer(e, "")
            status, answer = error.status, error.body
        return Response(answer, status, {"Cache-Control": "no-store"}, "application/json")


def _engine_state(status: EngineStatus) -> EngineState:
    return EngineState(
        id=status.engine_id,
        address=status.address,
        state=status.state.name.lower(),
        rank=status.index,
        running=status.num_running_reqs,
        waiting=status.num_waiting_reqs,
        kv_cache_usage=status.kv_cache_usage,
    )
