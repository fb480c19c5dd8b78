"""The context of requests of ``penstock.inference.v1``."""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.types.request_context import RequestContext
from penstock_frontend.api.call_context import context_of_call, deadline_after

Message: TypeAlias = pb.GenerateRequest | pb.ChatRequest | pb.EmbedRequest | pb.ClassifyRequest | pb.ScoreRequest


def context_of(message: Message, metadata: Mapping[str, str], time_left: float | None) -> RequestContext:
    """What the message and its call say. ``time_left``: seconds until the call's deadline. Raises InvalidArgument."""
    return msgspec.structs.replace(
        context_of_call(metadata, deadline=deadline_after(time_left), hints=message.routing),
        external_request_id=message.request_id,
        model=message.model,
        lora=message.lora,
        cache_salt=message.cache_salt if isinstance(message, pb.GenerateRequest | pb.ChatRequest) else "",
    )
