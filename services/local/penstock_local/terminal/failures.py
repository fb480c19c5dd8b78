"""How the commands say what a server has failed with."""

from penstock_common.errors import PenstockError, RequestFailed
from penstock_common.rpc.credentials import is_of_tls
from penstock_local.rpc.client import ServerUnreachableError


def describe_failure(error: RequestFailed) -> str:
    """The server's message with the field at fault, if one is, and when to try again."""
    field = f" ({error.field})" if error.field and error.field not in error.message else ""
    retry = f"; try again in {error.retry_after:g} s" if error.retry_after is not None else ""
    return f"{error.code}: {error.message}{field}{retry}"


def unreachable(error: ServerUnreachableError) -> str:
    """Why no server answers, and how to start one, unless one has answered and it is TLS that fails."""
    told = str(error)
    return told if is_of_tls(told) else f"{told}\nIs a server running? Start one with: penstock serve MODEL"


def one_line(error: PenstockError) -> str:
    """The same, also of errors that no server has sent."""
    return describe_failure(error) if isinstance(error, RequestFailed) else str(error)


def of_operators_api(error: PenstockError) -> str:
    """The same of a call to the operators' API, with where that listens when nothing answers."""
    if isinstance(error, ServerUnreachableError):
        return (
            f"{one_line(error)}\nIs a frontend running? Its operators' port listens on its own machine alone, as a rule; "
            "--admin-address says where."
        )
    return one_line(error)
