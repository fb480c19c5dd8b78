"""What becomes of request fields that nobody knows: a log line, a count, or a refusal."""

import asyncio
import re

from prometheus_client import CollectorRegistry, Counter
from starlette.types import Scope

from penstock_common.errors import InvalidArgument, nearest
from penstock_common.observability.logging import get_logger
from penstock_frontend.api.openai.unknown_fields import UnknownField, find_unknown
from penstock_frontend.auth.principal import caller_named
from penstock_frontend.telemetry.logged_once import LoggedOnce

_LARGE = 64 * 1024
"""Bytes of a body that is looked at in a thread."""
_MAX_LABELS = 50
"""Fields with a label of their own; the others are counted together."""
_LABEL = re.compile(r"[a-z][a-z0-9_]{0,39}(?:(?:\[\])?\.[a-z][a-z0-9_]{0,39}){0,3}")
"""Only what looks like a field of an API becomes a label."""
_OTHER = "other"
_MAX_NAME = 64


class FieldPolicy:
    """Looks at the fields of every HTTP body. Belongs to the event loop's thread.

    Args:
        refuse: Whether a body with an unknown field is refused; else the field is ignored.
        registry: For the count of unknown fields; None counts nothing.
    """

    def __init__(self, *, refuse: bool, registry: CollectorRegistry | None = None) -> None:
        self._refuse = refuse
        self._logged = LoggedOnce()
        self._labels: set[str] = set()
        self._count = (
            None
            if registry is None
            else Counter(
                "penstock:unknown_fields", "Fields of HTTP bodies that nobody knows", ["field"], registry=registry
            )
        )

    async def check(self, body: bytes, kind: type, client: str) -> None:
        """Look at a body that was decoded as ``kind``. ``client``: who sent it, as ``client_of`` says. Raises InvalidArgument."""
        # The thread lets the event loop serve others between two levels of a large body.
        large = len(body) > _LARGE
        found = await asyncio.to_thread(find_unknown, body, kind) if large else find_unknown(body, kind)
        if not found:
            return
        for field in found:
            if self._count is not None:
                self._count.labels(self._label(field.shape)).inc()
        self._tell(found, client)
        if self._refuse:
            raise _refusal(found[0])

    def _label(self, shape: str) -> str:
        if shape in self._labels:
            return shape
        if len(self._labels) >= _MAX_LABELS or not _LABEL.fullmatch(shape):
            return _OTHER
        self._labels.add(shape)
        return shape

    def _tell(self, found: list[UnknownField], client: str) -> None:
        new = self._logged.new(client, [_shortened(field.shape) for field in found])
        if new:
            get_logger().warning("request has unknown fields", fields=new, client=client, refused=self._refuse)


def client_of(scope: Scope) -> str:
    """Return whose call this is, for logs: the tenant or the name of its credentials, else its address."""
    address = scope.get("client")
    return caller_named(str(address[0]) if address else "local")


def _refusal(field: UnknownField) -> InvalidArgument:
    path, hint = _shortened(field.path), nearest(field.name, field.known)
    return InvalidArgument(
        f"{path} is not a known field{hint or '.'} {'Correct' if hint else 'Remove'} it; this server refuses unknown fields "
        "(http.unknown_fields)",
        field=path,
        reason="UNKNOWN_FIELD",
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}..."
