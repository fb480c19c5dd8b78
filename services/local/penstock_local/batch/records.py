"""Lines of the output and the error file, in OpenAI's batch format."""

import msgspec

from penstock_common.errors import RequestFailed

_PREFIX = "batch_req_"


class BatchResponse(msgspec.Struct, frozen=True):
    """What was answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, frozen=True):
    """Why nothing was asked, or nothing answered."""

    code: str
    message: str


class BatchRecord(msgspec.Struct, frozen=True):
    """What became of a line. ``id`` has the line's number, so that a batch that goes on knows which are done."""

    id: str
    custom_id: str
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def ok(self) -> bool:
        """Whether it belongs into the output."""
        return self.response is not None and self.response.status_code == 200


class _Done(msgspec.Struct, frozen=True):
    id: str
    custom_id: str


_DONE = msgspec.json.Decoder(_Done)
_ENCODER = msgspec.json.Encoder()


def answered(number: int, custom_id: str, response: BatchResponse) -> BatchRecord:
    """The record of an answer."""
    return BatchRecord(f"{_PREFIX}{number}", custom_id, response)


def failed(number: int, custom_id: str, error: RequestFailed) -> BatchRecord:
    """The record of a line without one."""
    return BatchRecord(f"{_PREFIX}{number}", custom_id, error=BatchError(error.reason.lower(), error.message))


def encoded(record: BatchRecord) -> bytes:
    """The record as a line."""
    return _ENCODER.encode(record) + b"\n"


def done_line(line: bytes) -> tuple[int, str]:
    """The number and the ``custom_id`` of a record's line. Raises ValueError for what is none."""
    done = _DONE.decode(line)
    return int(done.id.removeprefix(_PREFIX)), done.custom_id
