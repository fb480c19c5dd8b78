"""Context of the requests in the OpenAI API (model, tenant, priority and other fields)."""

import msgspec

from penstock_common.types.request import RequestContext
from penstock_frontend.api.http.endpoint import Call
from penstock_frontend.api.openai.body_fields import check_range

_INT32 = 2**31


class ContextFields(msgspec.Struct, kw_only=True):
    """Fields of the request context that all bodies with inputs share.

    ``priority`` and ``request_id`` are fields of vLLM. ``lora`` is a field of Penstock that names a LoRA adapter.
    ``model`` may name the adapter instead.
    """

    model: str | None = None
    lora: str | None = None
    priority: int | None = None
    request_id: str | None = None


class GenerationContextFields(ContextFields, kw_only=True):
    """Fields of the request context that bodies have if they generate text."""

    cache_salt: str | None = None


def context_of(call: Call, prefix: str, body: ContextFields) -> RequestContext:
    """Return the context of the requests of a body. For fields that the body does not set, the headers of the call are
    used.

    ``prefix`` is the prefix of the request id and of the answer's id. Raises InvalidArgument if a field of the body is
    not valid.
    """
    check_range("priority", body.priority, -_INT32, _INT32 - 1)
    return msgspec.structs.replace(
        call.context,
        external_request_id=call.name(prefix, body.request_id),
        model=body.model or "",
        lora=body.lora or "",
        priority=call.context.priority if body.priority is None else body.priority,
        cache_salt=(body.cache_salt or "") if isinstance(body, GenerationContextFields) else "",
    )
