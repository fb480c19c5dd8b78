"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, which vLLM has as well."""

import msgspec

from penstock_common.errors import RequestFailed
from penstock_frontend.api.openai.bodies import Body
from penstock_frontend.api.openai.endpoint import Answer, Call, PlainText
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.calls.adapters import AdapterCalls

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PATHS = frozenset((LOAD, UNLOAD))
"""For callers with the scope admin."""
_NAMES = {"name": "lora_name", "path": "lora_path"}


class LoadLoraAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of a load. ``lora_path``: a directory on the engines' machines. ``load_inplace``: take the place of an adapter
    with other content. ``pinned`` is our own: engines keep it in memory.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    pinned: bool | None = None


class UnloadLoraAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of an unload. ``lora_int_id`` is vLLM's, and not read."""

    lora_name: str
    lora_int_id: int | None = None


class LoraAdapters:
    """The handlers."""

    def __init__(self, adapters: AdapterCalls) -> None:
        self._adapters = adapters

    async def load(self, call: Call, given: Body) -> Answer:
        """Have every engine read an adapter, and give it a name. Raises RequestFailed."""
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
        """Take a name away. Raises RequestFailed."""
        body = await given.decode(UnloadLoraAdapterRequest)
        given.close()
        try:
            await self._adapters.unload(body.lora_name)
        except RequestFailed as e:
            raise renamed(e, _NAMES) from e
        return PlainText(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
