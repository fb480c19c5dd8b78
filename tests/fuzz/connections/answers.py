"""Answers on a raw connection, and checks that they fit the client's input."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from tests.fuzz.connections.client import Heard
from tests.fuzz.connections.script import Script
from tests.fuzz.http2 import DATA, frames_in
from tests.fuzz.rpc_calls import End

_STATUS = re.compile(rb"HTTP/1\.[01] (\d\d\d) ?[^\r\n]*\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_GRPC_STATUS = re.compile(rb"grpc-status[\x01\x02](\d{1,2})(?:.{,3}grpc-message.([ -~]*))?", re.DOTALL)
"""Pattern of status headers from gRPC servers: a length byte and an uncompressed value for each header."""
_UNANSWERED_PING = b"ping timeout"
"""Error of a server for a client that does not answer pings. A busy machine can cause it before the call is answered.
"""
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked\r\n", re.IGNORECASE)


class Answer(NamedTuple):
    """A final HTTP answer. ``whole`` says whether the body is complete."""

    status: int
    body: bytes
    whole: bool


class Unreadable(ValueError):  # noqa: N818 - it says what the answers are
    """Exception for data from a server that is not a valid HTTP answer."""


def answers_in(received: bytes) -> list[Answer]:
    """Return the final answers in order. Raises Unreadable."""
    found, at = [], 0
    while at < len(received):
        end = received.find(b"\r\n\r\n", at)
        matched = _STATUS.match(received, at)
        if matched is None:
            if end < 0 and b"HTTP/1.1 ".startswith(received[at : at + 9]):
                break  # the connection ended during this answer
            raise Unreadable(f"no answer but {received[at : at + 100]!r}")
        if end < 0:
            break
        status, head, at = int(matched[1]), received[at : end + 4], end + 4
        if status < 200:  # a final answer follows
            continue
        body, at, whole = _body(received, head, at)
        found.append(Answer(status, body, whole))
    return found


def _body(received: bytes, head: bytes, at: int) -> tuple[bytes, int, bool]:
    """Return the body, the position of its end, and whether the body is complete."""
    if length := _LENGTH.search(head):
        end = at + int(length[1])
        return received[at:end], end, end <= len(received)
    if not _CHUNKED.search(head):
        return received[at:], len(received), True
    body = bytearray()
    while (line := received.find(b"\r\n", at)) >= 0:
        try:
            size = int(received[at:line], 16)
        except ValueError:
            raise Unreadable(f"no chunk but {received[at : at + 40]!r}") from None
        at = line + 2 + size + 2
        body += received[line + 2 : line + 2 + size]
        if not size:
            return bytes(body), at, at <= len(received)
    return bytes(body), len(received), False


def judge(script: Script, heard: Heard, known: Mapping[str, bytes]) -> End:
    """Return how a connection ended, and the problems. ``known`` has the expected answers by name of the request."""
    if heard.refused:
        return End("(no connection)", heard.refused)
    if heard.late:
        return End("(no end)", slow=True)
    if not script.reads:
        return End("(not read)")
    try:
        return _judge_grpc(script, heard, known) if script.is_grpc else _judge_http(script, heard, known)
    except Unreadable as e:
        return End("(unreadable)", str(e))


def _judge_http(script: Script, heard: Heard, known: Mapping[str, bytes]) -> End:
    answers = answers_in(heard.received)
    statuses = Counter(answer.status for answer in answers)
    code = " ".join(map(str, sorted(statuses))) or ("(closed)" if heard.closed else "(left)")
    for status in statuses:
        if status >= 500 if not script.allowed else status not in script.allowed:
            body = next(answer.body for answer in answers if answer.status == status)
            return End(code, f"it was answered {status}: {body[:200]!r}")
    if len(answers) > script.most:
        return End(code, f"{len(answers)} answers to {script.most} requests")
    if len(answers) < script.least:
        return End(code, f"{len(answers)} answers to {script.least} requests")
    return End(code, _difference(script, [a.body for a in answers if a.status == 200], known))


def _judge_grpc(script: Script, heard: Heard, known: Mapping[str, bytes]) -> End:
    sent = [frame.payload for frame in frames_in(heard.received) if frame.kind == DATA and frame.payload]
    code = "(answered)" if sent else "(closed)" if heard.closed else "(left)"
    if script.window >= 0 and (size := sum(map(len, sent))) > script.window:
        return End(code, f"{size} bytes of data came; the window is {script.window}")
    if _UNANSWERED_PING in heard.received:  # clients of these scripts never answer pings
        return End("(ping timeout)")
    if len(sent) < script.least:
        found = _GRPC_STATUS.search(heard.received)
        why = f"; the call ended with status {found[1].decode()} {(found[2] or b'').decode()}" if found else ""
        return End(code, f"{len(sent)} answers to {script.least} calls{why}")
    return End(code, _difference(script, sent, known))


def _difference(script: Script, bodies: list[bytes], known: Mapping[str, bytes]) -> str:
    """Return the problem with the bodies of the answers, or an empty string."""
    if not script.known:
        return ""
    right = known[script.known]
    wrong = next((body for body in bodies if body != right), None)
    return "" if wrong is None else f"another answer: {wrong[:100]!r} where it is {right[:100]!r}"


def first_answer(script: Script, heard: Heard) -> bytes:
    """Return the body of the first HTTP answer, or the first message of a gRPC call; empty if there is none."""
    if script.is_grpc:
        return next((each.payload for each in frames_in(heard.received) if each.kind == DATA and each.payload), b"")
    return next((answer.body for answer in answers_in(heard.received) if answer.status == 200), b"")
