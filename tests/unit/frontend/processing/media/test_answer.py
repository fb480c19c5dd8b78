from collections.abc import Iterable

import pytest

from penstock_frontend.processing.media.http_client import Answer, BadAnswer

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def fed(*pieces: bytes, is_closed: bool = False) -> Answer:
    answer, received = Answer(), 0
    for piece in pieces:
        answer.feed(piece, received := received + len(piece))
    if is_closed:
        answer.feed(b"", received)
    return answer


def bytes_until_given_up(pieces: Iterable[bytes]) -> tuple[int, str]:
    """How many bytes are taken, and what is said then. Fails for more than a megabyte."""
    answer, received = Answer(), 0
    for piece in pieces:
        received += len(piece)
        assert received < 1024 * 1024
        try:
            answer.feed(piece, received)
        except BadAnswer as e:
            return received, str(e)
    raise AssertionError("it ended")


def endless(first: bytes, piece: bytes) -> Iterable[bytes]:
    yield first
    while True:
        yield piece


@pytest.mark.parametrize("step", [1, 2, 7, 10_000])
@pytest.mark.parametrize(
    "given",
    [
        HEAD + b"Content-Length: 5\r\n\r\nabcde",
        CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
        CHUNKED + b"3;name=value\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\nLocation: y\r\n\r\n",
        CHUNKED + b"3  \r\nabc\r\n02  \r\nde\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
        + HEAD
        + b"Content-Length: 5\r\n\r\nabcde",
        HEAD + b"Upgrade: h2,h2c\r\nConnection: Upgrade, close\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.1 200 OK\nContent-Length: 5\n\nabcde",
        HEAD + b"Content-Length: 5\r\n\r\nabcdeHTTP/1.1 404 Not Found\r\nContent-Length: 1\r\n\r\nx",
        HEAD + b"Content-Length: 5\r\n\r\nabcde\0\0garbage",
    ],
    ids=range(11),
)
def test_an_answer_is_the_same_in_pieces_of_any_size(given: bytes, step: int) -> None:
    answer = fed(*(given[start : start + step] for start in range(0, len(given), step)))
    assert (answer.status, bytes(answer.body), answer.is_complete) == (200, b"abcde", True)
    assert "link" not in answer.headers
    assert "trailer" not in answer.headers


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    assert not fed(HEAD + b"\r\nabc").is_complete
    answer = fed(HEAD + b"\r\nabc", b"de", is_closed=True)
    assert (bytes(answer.body), answer.is_complete) == (b"abcde", True)


@pytest.mark.parametrize(
    "given",
    [b"", HEAD, HEAD + b"Content-Length: 5\r\n\r\nabcd", CHUNKED + b"3\r\nabc\r\n", CHUNKED + b"0\r\nTrailer: x\r\n"],
    ids=range(5),
)
def test_an_answer_that_is_cut_off_is_a_lost_connection(given: bytes) -> None:
    answer = fed(given) if given else Answer()
    with pytest.raises(ConnectionResetError):
        answer.feed(b"", len(given))


@pytest.mark.parametrize(
    "given",
    [
        b"not http at all\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"\0" * 50,
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: " + b"9" * 50 + b"\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Name : x\r\n\r\n",
        HEAD + b"Name: a\0b\r\n\r\n",
        HEAD + b": x\r\n\r\n",
        CHUNKED + b"zz\r\nab",
        CHUNKED + b"ffffffffffffffffffff\r\nab",
        CHUNKED + b"1\r\nabc\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    ],
    ids=range(14),
)
def test_what_is_no_http_is_a_bad_answer(given: bytes) -> None:
    with pytest.raises(BadAnswer, match="breaks the protocol"):
        fed(given)


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (CHUNKED, b"1\r\nx\r\n"),
        (CHUNKED, b"10\r\n" + b"x" * 16 + b"\r\n"),
        (CHUNKED, b"10;" + b"e" * 64 + b"\r\n" + b"x" * 16 + b"\r\n"),
        (CHUNKED + b"1;", b"extension"),
        (CHUNKED + b"0\r\n", b"T: " + b"x" * 1000 + b"\r\n"),
        (CHUNKED + b"0\r\nTrailer: ", b"x"),
        (HEAD, b"Name: " + b"x" * 1000 + b"\r\n"),
        (HEAD + b"Name: ", b"x"),
        (HEAD, b"x"),
        (b"HTTP/1.1 200 ", b"reason"),
        (b"HTTP/1.1 100 Continue\r\n", b"Name: " + b"x" * 1000 + b"\r\n"),
    ],
    ids=range(11),
)
def test_answers_with_much_beside_the_file_are_given_up(first: bytes, piece: bytes) -> None:
    taken, said = bytes_until_given_up(endless(first, piece))
    assert "more than 65536 bytes of headers, chunk sizes and the like" in said
    assert taken <= 64 * 1024 * 20 + len(first)


def test_one_byte_chunks_are_given_up_after_as_many_bytes_as_any_other_framing() -> None:
    taken, _ = bytes_until_given_up(endless(CHUNKED, b"1\r\nx\r\n"))
    assert 64 * 1024 < taken < 96 * 1024


def test_headers_and_informational_answers_are_counted() -> None:
    taken, said = bytes_until_given_up(endless(HEAD, b"a:b\r\n"))
    assert "more than 256 headers" in said
    assert taken < 2000
    taken, said = bytes_until_given_up(endless(b"HTTP/1.1 102 Processing\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"))
    assert "more than 16 informational answers" in said
    assert taken < 1000


def test_a_file_in_chunks_as_servers_send_them_is_taken() -> None:
    chunk = b"40\r\n" + b"x" * 64 + b"\r\n"
    assert len(fed(CHUNKED, *[chunk] * 20_000, b"0\r\n\r\n").body) == 64 * 20_000
