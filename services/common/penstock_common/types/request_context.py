"""What a request says besides what is to be computed."""

import msgspec


class RequestContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whose a request is, where and until when it should run, and what it may share.

    ``context_of`` of each protocol makes it, the frontend's ``InputProcessor.checked_context`` completes it, and whatever passes
    the request on, to the scheduler and the workers, passes it on whole. So a new field of this kind is added here, in
    ``penstock_common.rpc.request_context`` where it crosses the wire, in the protocols that have it, and where it is read.
    """

    external_request_id: str = ""
    """Id that the client knows the request by. The frontend chooses one where the client gave none."""
    model: str = ""
    """The model that the client asked for; empty: the one that is served. It does not cross the wire: an engine serves one."""
    lora: str = ""
    """The LoRA adapter that the client asked for; ``model`` may name one as well. Empty: none. It does not cross the wire:
    ``EngineCoreRequest.lora`` does."""
    data_parallel_rank: int | None = None
    """Rank of the engine that the request must run on; None: any. Engines that get it serve rank 0."""
    priority: int = 0
    """Under the priority policy lower numbers run first. An int32."""
    tenant: str = ""
    """Whose share of the engines the request takes; empty: of all requests that name no tenant."""
    tenant_weight: float = 1.0
    """The tenant's share relative to that of others, from MIN_TENANT_WEIGHT to MAX_TENANT_WEIGHT."""
    cache_salt: str = ""
    """Requests share cached prefixes only with those that have the same salt."""
    arrival_time: float = 0.0
    """When the frontend got the request, in seconds since the Unix epoch."""
    deadline: float | None = None
    """When the request ends with DEADLINE_EXCEEDED, in seconds since the Unix epoch; None: never."""
    trace_context: dict[str, str] = {}
    """W3C Trace Context headers of the span whose children the next service's spans are; empty: the request is not traced."""
