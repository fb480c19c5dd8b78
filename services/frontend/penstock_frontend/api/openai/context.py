"""The context of requests of the OpenAI API."""

import msgspec

from penstock_common.types.request import RequestContext
from penstock_frontend.api.http.endpoint import Call
from penstock_frontend.api.openai.body_fields import check_range

_INT32 = 2**31


class ContextFields(msgspec.Struct, kw_only=True):
    """Fields of every body that has something computed. All but ``model`` and ``lora`` are vLLM's, ``lora`` is our own: a LoRA
    adapter, which ``model`` may name as well.
    """

    model: str | None = None
    lora: str | None = None
    priority: int | None = None
    request_id: str | None = None


class GenerationContextFields(ContextFields, kw_only=True):
    """Those of bodies that have text generated."""

    cache_salt: str | None = None


def context_of(call: Call, prefix: str, body: ContextFields) -> RequestContext:
    """What the body says, else the call's headers. ``prefix``: of the answer's id, which is the request's. Raises
    InvalidArgument.
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
