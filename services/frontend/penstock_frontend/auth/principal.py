"""Who calls."""

from contextvars import ContextVar
from typing import Literal, TypeAlias

import msgspec

Scope: TypeAlias = Literal["inference", "admin"]
"""What a caller may use: what the public APIs serve to everyone, or what is the operators'."""


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A caller whose credentials were right. ``name`` is for logs; ``any_tenant``: it may speak for every tenant, as gateways
    do, else its requests are ``tenant``'s.
    """

    name: str
    tenant: str = ""
    any_tenant: bool = False
    scopes: frozenset[Scope] = frozenset({"inference"})


current_principal: ContextVar[Principal | None] = ContextVar("current_principal", default=None)
"""Who makes the call that this task serves; None where nobody is asked."""


def tenant_of_caller(claimed: str) -> str:
    """The tenant whose request this is: the caller's own, whatever it claims, unless it may speak for others."""
    principal = current_principal.get()
    return claimed if principal is None or principal.any_tenant else principal.tenant


def caller_named(address: str) -> str:
    """Whose call this is, for logs: the caller's tenant or the name of its credentials, else the address that it comes from."""
    principal = current_principal.get()
    return address if principal is None else principal.tenant or principal.name
