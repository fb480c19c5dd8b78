"""``/v1/models`` in the format of Anthropic's clients."""

import datetime as dt
from collections.abc import Sequence

import msgspec

from penstock_common.errors import InvalidArgument, quoted
from penstock_frontend.api.http.endpoint import Answer, Call
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.openai.models import Models

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 1000


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model or a LoRA adapter in the list of models.

    ``created_at`` is the start time of this server. ``max_input_tokens`` is null while no engine is connected.
    """

    type: str = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int | None


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the list of models."""

    data: Sequence[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class AnthropicModels:
    """Handlers of ``/v1/models`` in Anthropic's format. The handlers read the models from ``models``, which is the
    handler for OpenAI's format.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    async def list(self, call: Call, given: Body) -> Answer:
        """Return a page of the list of models. Raises InvalidArgument for a limit that is not valid, or for an unknown
        id.
        """
        del given
        infos = [self._info(name) for name in self._models.names()]
        first, last = 0, len(infos)
        if (after := call.query.get("after_id")) is not None:
            first = self._index(after, "after_id") + 1
        limit = _limit(call.query.get("limit"))
        if (before := call.query.get("before_id")) is not None:
            last = self._index(before, "before_id")
            page = infos[max(first, last - limit) : last]
            more = last - limit > first
        else:
            page = infos[first : first + limit]
            more = first + limit < last
        return ModelPage(
            data=page,
            has_more=more,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
        )

    async def get(self, call: Call, given: Body) -> Answer:
        """Return the model with this name. Raises NotFound if there is no such model."""
        del given
        return self._info(call.path["name"])

    def _index(self, name: str, field: str) -> int:
        names = self._models.names()
        if name not in names:
            raise InvalidArgument(f"{field} is {quoted(name)}, which is not a model of this server", field=field)
        return names.index(name)

    def _info(self, name: str) -> ModelInfo:
        limits = self._models.named(name).llm.engines.view.limits
        created = dt.datetime.fromtimestamp(self._models.created, dt.UTC)
        return ModelInfo(
            id=name,
            display_name=name,
            created_at=created.isoformat().replace("+00:00", "Z"),
            max_input_tokens=limits.max_model_len if limits else None,
        )


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX_LIMIT):
        raise InvalidArgument(f"limit is {quoted(text)}; it must be from 1 to {_MAX_LIMIT}", field="limit")
    return int(text)
