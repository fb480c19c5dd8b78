"""Bounds of the waiting queue."""

from penstock_common.drain_rate import DrainRate, retry_after
from penstock_common.errors import ResourceExhausted
from penstock_enginecore.config import SchedulerConfig
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.waiting import WaitingRequests


class QueueAdmission:
    """Refuses what would overfill the queue, and measures how fast requests leave it for the model.

    Requests that are held count. An empty queue takes any request. A full queue refuses the tenants above their fair share,
    and takes requests of the others into a reserve beyond the limits, as ``TenantRoom`` says.
    One that outlived another engine was admitted there: it is never refused, however full this queue is.
    """

    def __init__(self, config: SchedulerConfig, waiting: WaitingRequests) -> None:
        self._config = config
        self._waiting = waiting
        self._rate = DrainRate()

    def check(self, request: Request, now: float) -> None:
        """Raise ResourceExhausted, with the time until there is room, unless the queue may take ``request``.

        ``now``: monotonic seconds. Until a request has left the queue there is no rate to go by. Then the wait of its
        head stands for the time that the whole queue takes, and half of that is what the client is told.
        """
        num_waiting = len(self._waiting)
        if not num_waiting:
            self._rate.begin(now)
            return
        if request.outlives:
            return
        config = self._config
        num_tokens = self._waiting.num_tokens + request.num_tokens
        if self._waiting.takes(request, max_requests=config.max_waiting_requests, max_tokens=config.max_waiting_tokens):
            return
        if num_waiting >= config.max_waiting_requests:
            why = f"{num_waiting} requests are waiting, scheduler.max_waiting_requests is {config.max_waiting_requests}"
        else:
            why = f"{num_tokens} tokens would be waiting, scheduler.max_waiting_tokens is {config.max_waiting_tokens}"
        too_many = max(num_waiting + 1 - config.max_waiting_requests, 0)
        seconds = self._rate.time_for(now, too_many, max(num_tokens - config.max_waiting_tokens, 0))
        if seconds is None:
            head = self._waiting.head() or self._waiting.longest_held()
            seconds = (now - head.queued_time) / 2
        raise ResourceExhausted(f"the engine's queue is full: {why}", retry_after=retry_after(seconds))

    def started(self, request: Request, now: float) -> None:
        """A request has left the queue for the first time. One that comes back took no room that others could have had."""
        self._rate.left(now, request.num_tokens)
