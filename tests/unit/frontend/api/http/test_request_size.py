"""Limits for the head of a request, and for the framing of its body."""

import pytest

from penstock_frontend.api.http.request_parsing import RequestLimits, RequestSize
from penstock_frontend.api.openai.errors import HttpError

LIMITS = RequestLimits(max_header_bytes=1000, max_headers=3)


@pytest.fixture
def size() -> RequestSize:
    return RequestSize(LIMITS)


def test_a_head_may_have_its_limit(size: RequestSize) -> None:
    size.add(1000)
    with pytest.raises(HttpError, match=r"the headers have more than 1000 bytes; http\.max_header_bytes") as caught:
        size.add(1)
    assert (caught.value.status, caught.value.code) == (431, "headers_too_large")


def test_headers_are_counted_with_trailers(size: RequestSize) -> None:
    for _ in range(2):
        size.add_header()
    size.complete_head()
    size.add_header()
    with pytest.raises(HttpError, match=r"more than 3 headers; http\.max_headers is 3") as caught:
        size.add_header()
    assert caught.value.status == 431


def test_a_body_in_large_chunks_may_have_any_length(size: RequestSize) -> None:
    size.add(900)
    size.complete_head()
    for _ in range(1000):
        size.body += 10
        size.add(18)


def test_a_body_in_chunks_of_one_byte_is_refused(size: RequestSize) -> None:
    size.add(100)
    size.complete_head()
    for _ in range(225):  # 900 bytes of room, of which a chunk takes five and brings one
        size.body += 1
        size.add(6)
    with pytest.raises(HttpError, match="1225 bytes around a body of 225|bytes around a body of 226 bytes") as caught:
        size.body += 1
        size.add(6)
    assert (caught.value.status, caught.value.code) == (400, "chunks_too_small")


def test_bytes_that_are_no_body_are_refused_wherever_they_are(size: RequestSize) -> None:
    size.complete_head()
    with pytest.raises(HttpError, match="chunk extensions"):
        size.add(1001)  # of an extension, or a trailer, that does not end


def test_each_request_is_counted_anew(size: RequestSize) -> None:
    for _ in range(3):
        size.begin()
        size.add(1000)
        for _ in range(3):
            size.add_header()
