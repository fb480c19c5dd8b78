"""Choice of the model of each HTTP call, for servers with several models."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from penstock_frontend.api.http.endpoint import Answer, Call, Handler
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.served_models import ServedModel, ServedModels


class RequestedNames(NamedTuple):
    """Names in a request that choose the model. ``lora_field`` is the field of the LoRA adapter's name."""

    model: str
    lora: str = ""
    lora_field: str = "lora"


class _JsonNames(msgspec.Struct, frozen=True):
    model: str | None = None
    lora: str | None = None


ReadNames: TypeAlias = Callable[[Body], Awaitable[RequestedNames]]
"""Function that reads the requested names from a body, and keeps the body for its handler."""


async def json_names(given: Body) -> RequestedNames:
    """Read the names from the fields ``model`` and ``lora`` of a JSON body. Raises InvalidArgument."""
    names = await given.peek(_JsonNames)
    return RequestedNames(names.model or "", names.lora or "")


class ModelSwitch:
    """Handler that passes each call to the handler of the requested model."""

    def __init__(self, models: ServedModels, handlers: Sequence[Handler], read: ReadNames = json_names) -> None:
        """``handlers`` has one handler per model, in the order of ``models``."""
        self._models = models
        self._handlers = {model.name: handler for model, handler in zip(models, handlers, strict=True)}
        self._read = read

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Serve a call with the requested model. Raises the errors of ``ServedModels.of``."""
        names = await self._read(given)
        model = self._models.of(names.model, names.lora, lora_field=names.lora_field)
        return await self._handlers[model.name](call, given)


def for_each_model(
    models: ServedModels, make: Callable[[ServedModel], Handler], read: ReadNames = json_names
) -> Handler:
    """Return a handler for all models. ``make`` creates the handler of one model.

    With only one model, the result is the handler of this model, which does not need to read the model's name.
    """
    handlers = [make(model) for model in models]
    return handlers[0] if len(handlers) == 1 else ModelSwitch(models, handlers, read)
