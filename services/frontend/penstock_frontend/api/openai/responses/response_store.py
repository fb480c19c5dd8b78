"""Responses that are kept, for later ones that go on with them."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from penstock_common.errors import InvalidArgument, NotFound, quoted
from penstock_frontend.api.openai.responses.response import Response
from penstock_frontend.api.openai.responses.response_body import InputItem
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
