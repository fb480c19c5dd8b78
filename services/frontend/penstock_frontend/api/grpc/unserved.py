"""Methods of a contract that this version does not serve."""

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from penstock_common.errors import Unimplemented

T = TypeVar("T")


def refuses_unserved(service: ServiceDescriptor) -> Callable[[type[T]], type[T]]:
    """Class decorator: methods of ``service`` that the class does not define end as UNIMPLEMENTED, naming the method."""

    def decorate(servicer: type[T]) -> type[T]:
        for method in service.methods:
            if method.name not in vars(servicer):
                setattr(servicer, method.name, _refusing(method))
        return servicer

    return decorate


def _refusing(method: MethodDescriptor) -> Callable[..., Any]:
    error = f"{method.name} is not served yet"

    async def refuse(*_: object) -> None:
        raise Unimplemented(error)

    async def refuse_stream(*_: object) -> AsyncIterator[object]:
        if error:  # always; the yield makes this a stream
            raise Unimplemented(error)
        yield None

    return refuse_stream if method.server_streaming else refuse
