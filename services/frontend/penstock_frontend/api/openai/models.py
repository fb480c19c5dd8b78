"""``/v1/models``, ``/version``, and loading and unloading of LoRA adapters (``/v1/load_lora_adapter``, as in vLLM)."""

import importlib.metadata
import time
from collections.abc import Sequence

import msgspec

from penstock_common.errors import NotFound, RequestFailed
from penstock_frontend.api.http.endpoint import Answer, Call, PlainText
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.calls.adapters import AdapterCalls
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.config import ModelConfig
from penstock_frontend.dispatch.adapters import NamedAdapter


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

    def __init__(self, llm: AsyncLLM, model: ModelConfig) -> None:
        self._llm = llm
        self._model = model
        self.created = int(time.time())
        """Start time of this server, in seconds since the Unix epoch."""

    def names(self) -> Sequence[str]:
        """Return the name of the model, and the names of its LoRA adapters."""
        return [self._model.name, *(named.adapter.name for named in self._llm.adapters.adapters.all())]

    async def list(self, call: Call, given: Body) -> Answer:
        """Return the model, its LoRA adapters, and the aliases of all of them."""
        adapters = self._llm.adapters.adapters.all()
        aliases = (self._named(name) for name in self._llm.adapters.adapters.aliases)
        return ModelList(data=[self._describe(), *map(self._adapter, adapters), *filter(None, aliases)])

    async def get(self, call: Call, given: Body) -> Answer:
        """Return the model or LoRA adapter with this name. Raises NotFound if there is no such model."""
        name = call.path["name"]
        if not name:
            raise NotFound(f"name is not set; known: {self._model.name}", field="name")
        self._llm.inputs.check_model(name)
        return self._named(name) or self._describe()

    def _named(self, name: str) -> Model | None:
        """Return the model or LoRA adapter with this name. Return None for an alias whose adapter does not exist."""
        adapters = self._llm.adapters.adapters
        adapter = adapters.get(name)
        if adapter is None and adapters.aliases.get(name, name) != self._model.name:
            return None
        return msgspec.structs.replace(self._describe() if adapter is None else self._adapter(adapter), id=name)

    def _adapter(self, named: NamedAdapter) -> Model:
        adapter = named.adapter
        return msgspec.structs.replace(self._describe(), id=adapter.name, root=adapter.path, parent=self._model.name)

    def _describe(self) -> Model:
        limits = self._llm.engines.view.limits
        return Model(
            id=self._model.name,
            created=self.created,
            root=self._model.path,
            max_model_len=limits.max_model_len if limits else None,
            capabilities=self._llm.engines.view.capabilities,
        )


# The code below loads and unloads LoRA adapters: ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as in vLLM.

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PATHS = frozenset((LOAD, UNLOAD))
"""Paths of these routes, which require the scope admin."""
_NAMES = {"name": "lora_name", "path": "lora_path"}


class LoadLoraAdapterRequest(msgspec.Struct, kw_only=True):
    """Request body of a call that loads a LoRA adapter.

    ``lora_path`` is a directory on the engines' machines. If the name belongs to an adapter with other
    content, the call replaces that adapter if ``load_inplace`` is true, and fails otherwise. ``pinned``, a field of
    Penstock, keeps the adapter in the engines' memory.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    pinned: bool | None = None


class UnloadLoraAdapterRequest(msgspec.Struct, kw_only=True):
    """Request body of a call that unloads a LoRA adapter. ``lora_int_id`` is a field of vLLM that has no effect."""

    lora_name: str
    lora_int_id: int | None = None


class LoraAdapters:
    """Handlers of the routes that load and unload LoRA adapters."""

    def __init__(self, adapters: AdapterCalls) -> None:
        self._adapters = adapters

    async def load(self, call: Call, given: Body) -> Answer:
        """Load a LoRA adapter on every engine, and register the adapter's name. Raises RequestFailed if the adapter is
        refused or an engine fails to load it.
        """
        body = await given.decode(LoadLoraAdapterRequest)
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
        given.close()
        try:
            await self._adapters.unload(body.lora_name)
        except RequestFailed as e:
            raise renamed(e, _NAMES) from e
        return PlainText(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


class Version(msgspec.Struct, frozen=True):
    """Answer of ``/version``."""

    version: str


async def version(call: Call, given: Body) -> Answer:
    """Return the version of the installed frontend package."""
    del call, given
    return Version(importlib.metadata.version("penstock-frontend"))
