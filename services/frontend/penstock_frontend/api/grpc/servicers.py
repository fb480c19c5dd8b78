"""Helpers for gRPC servicers: refusal of methods that are not supported, utility calls to all engines, and media
limits.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from penstock_common.errors import RequestFailed, Unavailable, Unimplemented
from penstock_common.types.media import MediaLimits
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.config import LimitsConfig
from penstock_frontend.dispatch.pool import error_of_engine
from penstock_frontend.interfaces import EngineClient

T = TypeVar("T")


def refuses_unserved(service: ServiceDescriptor) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that adds the methods of ``service`` that the class does not define.

    The added methods fail with UNIMPLEMENTED, and the error names the method.
    """

    def decorate(servicer: type[T]) -> type[T]:
        for method in service.methods:
            if method.name not in vars(servicer):
                setattr(servicer, method.name, _refusing(method))
        return servicer

    return decorate


def _refusing(method: MethodDescriptor) -> Callable[..., Any]:
    error = f"{method.name} is not supported"

    async def refuse(*_: object) -> None:
        raise Unimplemented(error)

    async def refuse_stream(*_: object) -> AsyncIterator[object]:
        if error:  # always true; because of the yield below, this function is an async generator
            raise Unimplemented(error)
        yield None

    return refuse_stream if method.server_streaming else refuse


async def ask_all(clients: Iterable[EngineClient], method: str, *arguments: object) -> dict[str, Any]:
    """Call a utility method on all engines of ``clients``. Return the results by engine id, in the order of the ids.

    The function waits until all engines have answered. If an engine failed, it then raises the first error, with the
    name of the engine. Raises Unavailable if no engine is connected.
    """
    answers = await asyncio.gather(*(client.call_utility(method, arguments) for client in clients))
    results = {engine: result for answer in answers for engine, result in answer.items()}
    if not results:
        raise Unavailable("no engine is connected", retry_after=1.0)
    for engine, result in sorted(results.items()):
        if isinstance(result, RequestFailed):
            raise error_of_engine(engine, result)
    return dict(sorted(results.items()))


def media_limits(llm: AsyncLLM, limits: LimitsConfig) -> list[MediaLimits]:
    """Return the limits on media of each modality that the model, the frontend and all engines accept.

    If their limits differ, the result has the lowest limit. The list is empty while no engine is connected.
    """
    engines, media = llm.engines.view.limits, llm.inputs.media
    if engines is None or media is None:
        return []
    found = []
    for each in engines.media:
        items = min(each.max_items, limits.max_media.of(each.modality))
        if items and each.modality in media.preparer.family.modalities:
            found.append(MediaLimits(modality=each.modality, max_items=items, max_tokens=each.max_tokens))
    return found
