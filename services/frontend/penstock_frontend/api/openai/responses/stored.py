"""``/v1/responses/{id}``: responses that were kept, asked for again, deleted, or ended while they are made."""

from typing import Any, cast

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.openai.bodies import Body
from penstock_frontend.api.openai.endpoint import Answer, Call
from penstock_frontend.api.openai.responses import response
from penstock_frontend.api.openai.responses.response import DeletedResponse, ItemList, Response
from penstock_frontend.api.openai.responses.response_store import ResponseStore

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
