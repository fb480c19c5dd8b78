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


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Used(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class _Done(msgspec.Struct, frozen=True):
    id: str
    custom_id: str


_DONE = msgspec.json.Decoder(_Done)
_USED = msgspec.json.Decoder(_Used)
_ENCODER = msgspec.json.Encoder()


def answered(number: int, custom_id: str, response: BatchResponse) -> BatchRecord:
    """The record of an answer."""
    return BatchRecord(f"{_PREFIX}{number}", custom_id, response)


def failed(number: int, custom_id: str, error: RequestFailed) -> BatchRecord:
    """The record of a line without one."""
    return BatchRecord(f"{_PREFIX}{number}", custom_id, error=BatchError(error.reason.lower(), error.message))


def tokens_of(record: BatchRecord) -> tuple[int, int]:
    """Prompt and output tokens that the answer says it has; 0 where it says nothing."""
    if record.response is None:
        return 0, 0
    try:
        usage = _USED.decode(record.response.body).usage
    except msgspec.ValidationError:  # an answer of another form
        usage = None
    return (usage.prompt_tokens, usage.completion_tokens) if usage is not None else (0, 0)


def encoded(record: BatchRecord) -> bytes:
    """The record as a line."""
    return _ENCODER.encode(record) + b"\n"


def done_line(line: bytes) -> tuple[int, str]:
    """The number and the ``custom_id`` of a record's line. Raises ValueError for what is none."""
    done = _DONE.decode(line)
    return int(done.id.removeprefix(_PREFIX)), done.custom_id
