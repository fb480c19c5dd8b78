"""Bounds of the waiting queue."""

from penstock_common.errors import ResourceExhausted
from penstock_enginecore.config import SchedulerConfig
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.held import HeldRequests
from penstock_enginecore.core.scheduler.queue import RequestQueue

MIN_RETRY_AFTER = 0.1
MAX_RETRY_AFTER = 60.0


def check_queue_limits(
    config: SchedulerConfig, waiting: RequestQueue, held: HeldRequests, request: Request, now: float
) -> None:
    """Raise ResourceExhausted when ``request`` would overfill the queue. An empty queue takes any request.

    ``held``: waiting requests that have something of their own to wait for. ``now``: monotonic seconds. The time to retry
    after comes from the queue: its head has waited for as long as the whole queue takes, and in half of that
    time half of the queue is gone.
    """
    num_waiting = len(waiting) + len(held)
    if not num_waiting:
        return
    num_tokens = waiting.num_tokens + held.num_tokens + request.num_tokens
    if num_waiting >= config.max_waiting_requests:
        why = f"{num_waiting} requests are waiting, scheduler.max_waiting_requests is {config.max_waiting_requests}"
    elif num_tokens > config.max_waiting_tokens:
        why = f"{num_tokens} tokens would be waiting, scheduler.max_waiting_tokens is {config.max_waiting_tokens}"
    else:
        return
    head = waiting.peek() if waiting else next(iter(held))
    retry_after = (now - head.queued_time) / 2
    raise ResourceExhausted(
        f"the engine's queue is full: {why}", retry_after=min(max(retry_after, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
    )
