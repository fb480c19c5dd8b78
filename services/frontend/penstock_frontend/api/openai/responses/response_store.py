"""Stored responses, which later calls can continue, and their routes under ``/v1/responses/{id}``."""

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
    """A response in progress, with its current state, its input, and a function that cancels it."""

    response: Response
    items: Sequence[InputItem]
    cancel: Callable[[], None]


class _Output(msgspec.Struct, frozen=True):
    """Output of a stored response, in the form of items that the input of a later call can contain."""

    output: list[InputItem]


class Kept(NamedTuple):
    """A stored response: the response, its input and the complete conversation as JSON, and the ids of its output
    items.
    """

    response: bytes
    items: bytes
    messages: bytes
    item_ids: Sequence[str]

    @property
    def size(self) -> int:
        """Size of the stored response in bytes."""
        return len(self.response) + len(self.items) + len(self.messages)


class ResponseStore:
    """In-memory store of responses, by tenant and id. A tenant can access only its own responses.

    If the store has too many responses or bytes, it drops the oldest response of the tenant with the most bytes. A
    tenant can therefore not displace the responses of tenants that use less memory.
    """

    def __init__(self, config: ResponsesConfig) -> None:
        self._config = config
        self._kept: dict[str, OrderedDict[str, Kept]] = {}
        self._holders: dict[str, dict[str, str]] = {}
        """Id of the response whose output has a given item, by tenant and item id."""
        self._sizes: dict[str, int] = {}
        self._running: dict[tuple[str, str], Running] = {}

    @property
    def enabled(self) -> bool:
        """True if this server stores responses."""
        return self._config.max_stored > 0

    def begin(self, tenant: str, running: Running) -> None:
        """Add a response in progress to the store. The store keeps the response when it ends."""
        self._running[tenant, running.response.id] = running

    def end(self, tenant: str, response_id: str) -> bool:
        """Remove a response in progress from the store. Return False if the store does not have the response any more,
        for example because a client deleted it. Idempotent.
        """
        return self._running.pop((tenant, response_id), None) is not None

    def keep(
        self, tenant: str, response: Response, items: Sequence[InputItem], messages: Sequence[ChatMessage]
    ) -> None:
        """Store a response that has ended. A response that is larger than the size limit of the store is not stored."""
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
        """Return the response with this id if it is in progress. Otherwise return None."""
        return self._running.get((tenant, response_id))

    def get(self, tenant: str, response_id: str, *, field: str = "response_id") -> Kept:
        """Return a stored response. Raises NotFound, and InvalidArgument if the server stores no responses."""
        self._check_enabled(field)
        of_tenant = self._kept.get(tenant)
        if of_tenant is None or (found := of_tenant.get(response_id)) is None:
            raise NotFound(
                f"{field} is {quoted(response_id)}, but no such response is stored; it may have been dropped",
                field=field,
            )
        return found

    def messages(self, tenant: str, response_id: str) -> list[ChatMessage]:
        """Return the messages of the conversation up to the end of a response. Raises the errors of ``get``."""
        kept = self.get(tenant, response_id, field="previous_response_id")
        return msgspec.json.decode(kept.messages, type=list[ChatMessage])

    def holder(self, tenant: str, item_id: str, *, field: str) -> str:
        """Return the id of the stored response whose output has an item.

        Raises:
            NotFound: No stored response of the tenant has the item.
            InvalidArgument: The server stores no responses.
        """
        self._check_enabled(field)
        if (found := self._holders.get(tenant, {}).get(item_id)) is None:
            raise NotFound(
                f"{field} is {quoted(item_id)}, but no stored response has this item; it may have been dropped. "
                "Send the item itself",
                field=field,
            )
        return found

    def output(self, tenant: str, response_id: str) -> list[InputItem]:
        """Return the output of a response, in the form of items that the input of a later call can contain. Raises the
        errors of ``get``.
        """
        return msgspec.json.decode(self.get(tenant, response_id).response, type=_Output).output

    def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response. If the response is in progress, it is also cancelled. Raises the errors of ``get``."""
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
                f"{field} is set, but this server stores no responses (http.responses.max_stored is 0)",
                field=field,
                reason="RESPONSES_NOT_STORED",
            )


# The code below replaces input items that refer to an item of a stored response by its id.

_REFERENCE = "item_reference"


def resolved(given: str | list[InputItem], store: ResponseStore, tenant: str) -> str | list[InputItem]:
    """Return the input, in which each reference to a stored item is replaced by that item.

    Raises:
        NotFound: None of the tenant's stored responses has the item that a reference names.
        InvalidArgument: The input has references, but the server stores no responses.
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


# The code below serves ``/v1/responses/{id}``.

_MAX_PAGE = 100
_PAGE = 20
_ORDERS = ("desc", "asc")


class _Ended(msgspec.Struct, frozen=True):
    """Fields of a stored response that the handlers read."""

    status: str


class StoredResponses:
    """Handlers of the routes ``/v1/responses/{id}``."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def get(self, call: Call, given: Body) -> Answer:
        """Return the current state of a response. Raises NotFound if no response with this id is stored."""
        if call.query.get("stream") == "true":
            raise Unimplemented(
                "stream is true, but a stored response cannot be streamed; set stream to false", field="stream"
            )
        tenant, response_id = _whose(call)
        if (running := self._store.running(tenant, response_id)) is not None:
            return running.response
        # The JSON encoder copies a msgspec.Raw without changes.
        return cast(Response, msgspec.Raw(self._store.get(tenant, response_id).response))

    async def delete(self, call: Call, given: Body) -> Answer:
        """Delete a response. Raises NotFound if no response with this id is stored."""
        tenant, response_id = _whose(call)
        self._store.delete(tenant, response_id)
        return DeletedResponse(id=response_id)

    async def cancel(self, call: Call, given: Body) -> Answer:
        """Cancel a response in progress, and return it with the output that it has so far. Raises NotFound, and
        InvalidArgument if the response has ended.
        """
        tenant, response_id = _whose(call)
        if (running := self._store.running(tenant, response_id)) is not None:
            running.cancel()
            return msgspec.structs.replace(running.response, status=response.CANCELLED)
        ended = msgspec.json.decode(self._store.get(tenant, response_id).response, type=_Ended)
        raise InvalidArgument(
            f"response {quoted(response_id)} has already ended with status {ended.status}; only a response in progress "
            "can be cancelled",
            field="response_id",
        )

    async def items(self, call: Call, given: Body) -> Answer:
        """Return a page of the input items of a response. Raises NotFound and InvalidArgument."""
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
            raise InvalidArgument(
                f"after is {quoted(after)}, but the response's input has no item with this id", field="after"
            )
        items = items[place + 1 :]
    page = items[:size]
    return ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > size,
    )
