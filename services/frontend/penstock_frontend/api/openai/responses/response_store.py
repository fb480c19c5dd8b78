"""Stored responses: kept for later ones that go on with them, and served, deleted or cancelled at ``/v1/responses/{id}``."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from penstock_common.errors import InvalidArgument, NotFound, Unimplemented, quoted
from penstock_frontend.api.http.endpoint import Answer, Call
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.openai.responses import response
from penstock_frontend.api.openai.responses.response import DeletedResponse, InputItem, ItemList, Response
from penstock_frontend.call_types import ChatMessage
from penstock_frontend.config import ResponsesConfig

_ENCODER = msgspec.json.Encoder()


class Running(NamedTuple):
    """A response in the making: as it is now, its input, and what ends it."""

    response: Response
    items: Sequence[InputItem]
    cancel: Callable[[], None]


class _Output(msgspec.Struct, frozen=True):
    """The output of a kept response, as items of a later input."""

    output: list[InputItem]


class Kept(NamedTuple):
    """A response that has ended: that, its input and the whole conversation, as JSON, and the ids of the items of its output."""

    response: bytes
    items: bytes
    messages: bytes
    item_ids: Sequence[str]

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.items) + len(self.messages)


class ResponseStore:
    """Responses by tenant and id. None of them is another tenant's to see.

    Where there are too many, or too many bytes, the oldest of the tenant that has the most bytes goes first: nobody's
    responses make those of others go.
    """

    def __init__(self, config: ResponsesConfig) -> None:
        self._config = config
        self._kept: dict[str, OrderedDict[str, Kept]] = {}
        self._holders: dict[str, dict[str, str]] = {}
        """By tenant and item of an output: the id of the response that has it."""
        self._sizes: dict[str, int] = {}
        self._running: dict[tuple[str, str], Running] = {}

    @property
    def enabled(self) -> bool:
        """Whether responses are kept at all."""
        return self._config.max_stored > 0

    def begin(self, tenant: str, running: Running) -> None:
        """A response that is to be kept has begun."""
        self._running[tenant, running.response.id] = running

    def end(self, tenant: str, response_id: str) -> bool:
        """It is not in the making any more. Returns whether it was: it may have been deleted meanwhile. Idempotent."""
        return self._running.pop((tenant, response_id), None) is not None

    def keep(
        self, tenant: str, response: Response, items: Sequence[InputItem], messages: Sequence[ChatMessage]
    ) -> None:
        """Keep a response that has ended, if it is not larger than the limit alone."""
        item_ids = [item.id for item in response.output]
        kept = Kept(_ENCODER.encode(response), _ENCODER.encode(items), _ENCODER.encode(messages), item_ids)
        if kept.size > self._config.max_stored_bytes:
            return
        self._kept.setdefault(tenant, OrderedDict())[response.id] = kept
        self._holders.setdefault(tenant, {}).update(dict.fromkeys(item_ids, response.id))
        self._sizes[tenant] = self._sizes.get(tenant, 0) + kept.size
        while self._num_kept > self._config.max_stored or sum(self._sizes.values()) > self._config.max_stored_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(largest, next(iter(self._kept[largest])))

    def running(self, tenant: str, response_id: str) -> Running | None:
        """The response if it is in the making."""
        return self._running.get((tenant, response_id))

    def get(self, tenant: str, response_id: str, *, field: str = "response_id") -> Kept:
        """A response that has ended. Raises NotFound; InvalidArgument where none are kept."""
        self._check_enabled(field)
        of_tenant = self._kept.get(tenant)
        if of_tenant is None or (found := of_tenant.get(response_id)) is None:
            raise NotFound(
                f"{field} is {quoted(response_id)}; there is no such response here, or not any more", field=field
            )
        return found

    def messages(self, tenant: str, response_id: str) -> list[ChatMessage]:
        """The conversation up to the end of a response. Raises as ``get`` does."""
        kept = self.get(tenant, response_id, field="previous_response_id")
        return msgspec.json.decode(kept.messages, type=list[ChatMessage])

    def holder(self, tenant: str, item_id: str, *, field: str) -> str:
        """Return the id of the kept response whose output has the item.

        Raises:
            NotFound: No kept response of the tenant has the item.
            InvalidArgument: The server keeps no responses.
        """
        self._check_enabled(field)
        if (found := self._holders.get(tenant, {}).get(item_id)) is None:
            raise NotFound(
                f"{field} is {quoted(item_id)}; no response that is kept here has such an item, or not any more; "
                "send the item itself",
                field=field,
            )
        return found

    def output(self, tenant: str, response_id: str) -> list[InputItem]:
        """Return the output of a response, as items of a later input. Raises as ``get`` does."""
        return msgspec.json.decode(self.get(tenant, response_id).response, type=_Output).output

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response; one in the making ends. Raises as ``get`` does."""
        if (running := self._running.pop((tenant, response_id), None)) is not None:
            running.cancel()
            return
        self.get(tenant, response_id)
        self._drop(tenant, response_id)

    @property
    def _num_kept(self) -> int:
        return sum(map(len, self._kept.values()))

    def _drop(self, tenant: str, response_id: str) -> None:
        dropped = self._kept[tenant].pop(response_id)
        self._sizes[tenant] -= dropped.size
        for item_id in dropped.item_ids:
            del self._holders[tenant][item_id]
        if not self._kept[tenant]:
            del self._kept[tenant], self._sizes[tenant], self._holders[tenant]

    def _check_enabled(self, field: str) -> None:
        if not self.enabled:
            raise InvalidArgument(
                f"{field} is set; this server keeps no responses (http.responses.max_stored is 0)",
                field=field,
                reason="RESPONSES_NOT_STORED",
            )


# Items of an input that only name an item of an earlier response, as clients send them that rely on stored responses.

_REFERENCE = "item_reference"


def resolved(given: str | list[InputItem], store: ResponseStore, tenant: str) -> str | list[InputItem]:
    """Return the input with the stored items in place of the references.

    Raises:
        NotFound: A reference names no item of a kept response of the tenant.
        InvalidArgument: There are references, and the server keeps no responses.
    """
    if isinstance(given, str) or not any(item.type == _REFERENCE for item in given):
        return given
    outputs: dict[str, Sequence[InputItem]] = {}
    items = []
    for index, item in enumerate(given):
        if item.type == _REFERENCE:
            response_id = store.holder(tenant, item.id or "", field=f"input[{index}].id")
            if response_id not in outputs:
                outputs[response_id] = store.output(tenant, response_id)
            item = next(each for each in outputs[response_id] if each.id == item.id)
        items.append(item)
    return items


# ``/v1/responses/{id}``.

_MAX_PAGE = 100
_PAGE = 20
_ORDERS = ("desc", "asc")


class _Ended(msgspec.Struct, frozen=True):
    """What is read of a response that has ended."""

    status: str


class StoredResponses:
    """The handlers."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def get(self, call: Call, given: Body) -> Answer:
        """A response as it is now. Raises NotFound."""
        if call.query.get("stream") == "true":
            raise Unimplemented("stream is true; a response that is kept is given in one piece", field="stream")
        tenant, response_id = _whose(call)
        if (running := self._store.running(tenant, response_id)) is not None:
            return running.response
        # The encoder copies a Raw as it is.
        return cast(Response, msgspec.Raw(self._store.get(tenant, response_id).response))

    async def delete(self, call: Call, given: Body) -> Answer:
        """Forget it. Raises NotFound."""
        tenant, response_id = _whose(call)
        self._store.delete(tenant, response_id)
        return DeletedResponse(id=response_id)

    async def cancel(self, call: Call, given: Body) -> Answer:
        """End one in the making, with what there is of it. Raises NotFound, InvalidArgument for one that has ended."""
        tenant, response_id = _whose(call)
        if (running := self._store.running(tenant, response_id)) is not None:
            running.cancel()
            return msgspec.structs.replace(running.response, status=response.CANCELLED)
        ended = msgspec.json.decode(self._store.get(tenant, response_id).response, type=_Ended)
        raise InvalidArgument(
            f"response_id is {quoted(response_id)}, which has ended ({ended.status}); one in the making can be cancelled",
            field="response_id",
        )

    async def items(self, call: Call, given: Body) -> Answer:
        """The items of its input, a page of them. Raises NotFound, InvalidArgument."""
        tenant, response_id = _whose(call)
        running = self._store.running(tenant, response_id)
        kept = msgspec.json.encode(running.items) if running else self._store.get(tenant, response_id).items
        return _page(msgspec.json.decode(kept, type=list[dict[str, Any]]), call)


def _whose(call: Call) -> tuple[str, str]:
    return call.context.tenant, call.path["response_id"]


def _page(items: list[dict[str, Any]], call: Call) -> ItemList:
    order, after, limit = call.query.get("order", "desc"), call.query.get("after", ""), call.query.get("limit", "")
    if order not in _ORDERS:
        raise InvalidArgument(f"order is {quoted(order)}; known: {', '.join(_ORDERS)}", field="order")
    size = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 4 else 0 if limit else _PAGE
    if not 1 <= size <= _MAX_PAGE:
        raise InvalidArgument(f"limit is {quoted(limit)}; it must be from 1 to {_MAX_PAGE}", field="limit")
    if order == "desc":
        items = items[::-1]
    if after:
        place = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise InvalidArgument(f"after is {quoted(after)}; the response's input has no such item", field="after")
        items = items[place + 1 :]
    page = items[:size]
    return ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > size,
    )
