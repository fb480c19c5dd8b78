"""``/v1/models``: what is served."""

import time
from collections.abc import Sequence

import msgspec

from penstock_common.errors import NotFound
from penstock_frontend.api.openai.bodies import Body
from penstock_frontend.api.openai.endpoint import Answer, Call
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.config import ModelConfig
from penstock_frontend.dispatch.adapters import NamedAdapter


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or a LoRA adapter of one, its ``parent``. ``max_model_len`` (tokens, null while no engine is up) and ``root``
    (its path) are vLLM's.
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
    """The answer."""

    object: str = "list"
    data: Sequence[Model]


class Models:
    """The handlers."""

    def __init__(self, llm: AsyncLLM, model: ModelConfig) -> None:
        self._llm = llm
        self._model = model
        self.created = int(time.time())
        """Seconds since the Unix epoch."""

    def names(self) -> Sequence[str]:
        """Return the names of the model and of its LoRA adapters."""
        return [self._model.name, *(named.adapter.name for named in self._llm.adapters.adapters.all())]

    async def list(self, call: Call, given: Body) -> Answer:
        """All of them: the model, the LoRA adapters of it, and aliases of these."""
        adapters = self._llm.adapters.adapters.all()
        aliases = (self._named(name) for name in self._llm.adapters.adapters.aliases)
        return ModelList(data=[self._describe(), *map(self._adapter, adapters), *filter(None, aliases)])

    async def get(self, call: Call, given: Body) -> Answer:
        """One of them. Raises NotFound."""
        name = call.path["name"]
        if not name:
            raise NotFound(f"name is not set; known: {self._model.name}", field="name")
        self._llm.inputs.check_model(name)
        return self._named(name) or self._describe()

    def _named(self, name: str) -> Model | None:
        """A model under one of its names; None for an alias of an adapter that there is not."""
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
