"""A request of a client's, from when it is accepted until it is over."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from penstock_common.errors import Cancelled
from penstock_common.lora.registration import LoraAdapter
from penstock_frontend.call_types import GenerateRequest, PoolingRequest
from penstock_frontend.calls.admission import Demand
from penstock_frontend.calls.request_telemetry import ObservedRequest
from penstock_frontend.processing.outputs.processor import RequestState


class LiveRequest:
    """A request between acceptance and release."""

    __slots__ = (
        "_aborted",
        "_wait",
        "demand",
        "done",
        "lora",
        "name",
        "observed",
        "prompt_token_ids",
        "released",
        "request",
        "request_id",
        "states",
    )

    def __init__(
        self, request_id: str, observed: ObservedRequest, demand: Demand, name: tuple[str, str] | None = None
    ) -> None:
        self.request_id = request_id
        """What its client calls it, a label that others may have, too."""
        self.name = name
        """Tenant and id under which it can be aborted from outside; None where it cannot."""
        self.demand = demand
        self.observed = observed
        self.lora: LoraAdapter | None = None
        """What it has applied to the model; None until that is known, too."""
        self.request: GenerateRequest | PoolingRequest | None = None
        """None until it is begun."""
        self.prompt_token_ids: Sequence[int] = ()
        """Empty until it is on its way to an engine, like ``states``."""
        self.states: Sequence[RequestState] = ()
        """Its sequences."""
        self.done = False
        """Whether all of its output was made."""
        self.released = False
        """Whether it is over."""
        self._aborted = False
        self._wait: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def until_aborted(self) -> AsyncIterator[None]:
        """What is waited for inside ends with Cancelled when the request is aborted."""
        try:
            async with asyncio.timeout(0 if self._aborted else None) as self._wait:
                yield
        except TimeoutError:
            if not self._aborted:
                raise
            raise Cancelled(f"request {self.request_id} was aborted", reason="ABORTED") from None
        finally:
            self._wait = None

    def abort(self) -> None:
        """End what is waited for. Idempotent."""
        if self._wait is not None and not self._aborted:
            self._wait.reschedule(0)
        self._aborted = True
