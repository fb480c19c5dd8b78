"""Why a medium is not taken, in the words of a client's error. No message has anything of a medium, nor a URL's path or query."""

from penstock_common.errors import FailedPrecondition, InvalidArgument, PermissionDenied, RequestFailed, Unavailable

UNREADABLE = "MEDIA_UNREADABLE"
TOO_LARGE = "MEDIA_TOO_LARGE"
TOO_MANY = "MEDIA_TOO_MANY"
NOT_ALLOWED = "MEDIA_NOT_ALLOWED"
FETCH_FAILED = "MEDIA_FETCH_FAILED"


def unreadable(field: str, why: str) -> InvalidArgument:
    """It is no such medium, or a broken one. ``why`` continues the field's name: ``is empty``."""
    return InvalidArgument(f"{field} {why}", field=field, reason=UNREADABLE)


def too_large(field: str, what: str, setting: str, limit: float) -> InvalidArgument:
    """``what`` continues the field's name, with the value: ``has 70000000 pixels``."""
    # Limits come from workers as float: 64000000.0 pixels would look odd.
    number = int(limit) if limit == int(limit) else limit
    return InvalidArgument(f"{field} {what}; {setting} is {number}", field=field, reason=TOO_LARGE)


def too_many(field: str, modality: str, count: int, limit: int) -> InvalidArgument:
    """A request has ``count`` items of that modality."""
    setting = f"limits.max_media.{modality}"
    return InvalidArgument(
        f"the request has {count} items of {modality}; {setting} is {limit}", field=field, reason=TOO_MANY
    )


def not_allowed(field: str, why: str) -> PermissionDenied:
    """Where it is said to be, or what it is, is not for this frontend."""
    return PermissionDenied(f"{field} {why}", field=field, reason=NOT_ALLOWED)


def shutting_down() -> Unavailable:
    """The frontend ends."""
    return Unavailable("this frontend is shutting down", reason="SHUTTING_DOWN", retry_after=1.0)


def fetch_failed(field: str, why: str, *, for_now: bool) -> RequestFailed:
    """Its host gave no file. ``for_now``: later it may. Never Unavailable: whoever names a dead host must not make clients try
    again by themselves, nor gateways think that this frontend is down.
    """
    kind = FailedPrecondition if for_now else InvalidArgument
    return kind(f"{field} could not be fetched: {why}", field=field, reason=FETCH_FAILED)
