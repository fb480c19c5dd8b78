"""``/v1/models``, ``/version``, and loading and unloading of LoRA adapters (``/v1/load_lora_adapter``, as in vLLM)."""

import importlib.metadata
import time
from collections.abc import Iterator, Sequence

import msgspec

from penstock_common.errors import FailedPrecondition, NotFound, RequestFailed
from penstock_frontend.api.http.endpoint import Answer, Call, PlainText
from penstock_frontend.api.http.model_switch import RequestedNames
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.dispatch.adapters import NamedAdapter
from penstock_frontend.served_models import ServedModel, ServedModels


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or a LoRA adapter of the model that ``parent`` names.

    ``max_model_len`` and ``root`` are fields of vLLM. ``max_model_len`` is a number of tokens, and null while no engine
    is connected. ``root`` is the path of the model or adapter.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "penstock"
    root: str
    parent: str | None = None
    max_model_len: int | None
    capabilities: Sequence[str]


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/v1/models``."""

    object: str = "list"
    data: Sequence[Model]


class Models:
    """Handlers of ``/v1/models``."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self.created = int(time.time())
        """Start time of this server, in seconds since the Unix epoch."""

    def names(self) -> Sequence[str]:
        """Return the names of the models, each followed by the names of its LoRA adapters."""
        return [
            name
            for model in self._models
            for name in (model.name, *(named.adapter.name for named in model.llm.adapters.adapters.all()))
        ]

    def named(self, name: str) -> ServedModel:
        """Return the model for which a name stands. Raises NotFound if there is no such model."""
        if not name:
            raise NotFound(f"name is not set; known: {', '.join(self._models.names)}", field="name")
        model = self._models.of(name)
        model.llm.inputs.check_model(name)
        return model

    async def list(self, call: Call, given: Body) -> Answer:
        """Return each model, its LoRA adapters, and the aliases of all of them."""
        return ModelList(data=[each for model in self._models for each in self._all_of(model)])

    async def get(self, call: Call, given: Body) -> Answer:
        """Return the model or LoRA adapter with this name. Raises NotFound if there is no such model."""
        name = call.path["name"]
        model = self.named(name)
        return self._named(model, name) or self._describe(model)

    def _all_of(self, model: ServedModel) -> Iterator[Model]:
        adapters = model.llm.adapters.adapters
        yield self._describe(model)
        yield from (self._adapter(model, named) for named in adapters.all())
        yield from filter(None, (self._named(model, name) for name in adapters.aliases))

    def _named(self, model: ServedModel, name: str) -> Model | None:
        """Return the model or LoRA adapter with this name. Return None for an alias whose adapter does not exist."""
        adapters = model.llm.adapters.adapters
        adapter = adapters.get(name)
        if adapter is None and adapters.aliases.get(name, name) != model.name:
            return None
        described = self._describe(model) if adapter is None else self._adapter(model, adapter)
        return msgspec.structs.replace(described, id=name)

    def _adapter(self, model: ServedModel, named: NamedAdapter) -> Model:
        adapter = named.adapter
        return msgspec.structs.replace(self._describe(model), id=adapter.name, root=adapter.path, parent=model.name)

    def _describe(self, model: ServedModel) -> Model:
        engines = model.llm.engines.view
        limits = engines.limits
        return Model(
            id=model.name,
            created=self.created,
            root=model.config.path,
            max_model_len=limits.max_model_len if limits else None,
            capabilities=engines.capabilities,
        )


# The code below loads and unloads LoRA adapters: ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as in vLLM.

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PATHS = frozenset((LOAD, UNLOAD))
"""Paths of these routes, which require the scope admin."""
_NAMES = {"name": "lora_name", "path": "lora_path"}


class LoadLoraAdapterRequest(msgspec.Struct, kw_only=True):
    """Request body of a call that loads a LoRA adapter.

    ``lora_path`` is a directory on the engines' machines. If the name belongs to an adapter with other
    content, the call replaces that adapter if ``load_inplace`` is true, and fails otherwise. ``pinned`` and ``model``
    are fields of Penstock. ``pinned`` keeps the adapter in the engines' memory. ``model`` is the base model, which must
    be set if the server has several models.
    """

    lora_name: str
    lora_path: str
    model: str | None = None
    load_inplace: bool | None = None
    pinned: bool | None = None


class UnloadLoraAdapterRequest(msgspec.Struct, kw_only=True):
    """Request body of a call that unloads a LoRA adapter. ``lora_int_id`` is a field of vLLM that has no effect.

    ``model``, a field of Penstock, is the base model.
    """

    lora_name: str
    model: str | None = None
    lora_int_id: int | None = None


class LoraAdapters:
    """Handlers of the routes that load and unload LoRA adapters."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._adapters = model.llm.adapters

    async def load(self, call: Call, given: Body) -> Answer:
        """Load a LoRA adapter on every engine, and register the adapter's name. Raises RequestFailed if the adapter is
        refused or an engine fails to load it.
        """
        body = await given.decode(LoadLoraAdapterRequest)
        self._check(body.model)
        given.close()
        try:
            await self._adapters.load(
                body.lora_name, body.lora_path, load_inplace=bool(body.load_inplace), pinned=bool(body.pinned)
            )
        except RequestFailed as e:
            raise renamed(e, _NAMES) from e
        return PlainText(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, call: Call, given: Body) -> Answer:
        """Remove the name of a LoRA adapter, so that requests cannot use this name any more. Raises RequestFailed if
        the name is unknown or LoRA is off.
        """
        body = await given.decode(UnloadLoraAdapterRequest)
        self._check(body.model)
        given.close()
        try:
            await self._adapters.unload(body.lora_name)
        except RequestFailed as e:
            raise renamed(e, _NAMES) from e
        return PlainText(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _check(self, name: str | None) -> None:
        self._model.llm.inputs.check_model(name or "")
        if not self._model.lora.http_loading:
            raise FailedPrecondition(
                f"lora.http_loading of model {self._model.name} is false; set it to true, or use the operators' API"
            )


async def names_to_load(given: Body) -> RequestedNames:
    """Read the base model from the body of a call that loads an adapter. Raises InvalidArgument."""
    return RequestedNames((await given.peek(LoadLoraAdapterRequest)).model or "")


async def names_to_unload(given: Body) -> RequestedNames:
    """Read the names from the body of a call that unloads an adapter. Raises InvalidArgument."""
    body = await given.peek(UnloadLoraAdapterRequest)
    return RequestedNames(body.model or "", body.lora_name, "lora_name")


class Version(msgspec.Struct, frozen=True):
    """Answer of ``/version``."""

    version: str


async def version(call: Call, given: Body) -> Answer:
    """Return the version of the installed frontend package."""
    del call, given
    return Version(importlib.metadata.version("penstock-frontend"))
