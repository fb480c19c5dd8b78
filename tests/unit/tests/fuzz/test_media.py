"""Hostile media: generated from seed and number only, half over each protocol, and judged by their defects."""

import asyncio

import pytest

from penstock_common.errors import InvalidArgument, RequestFailed
from penstock_frontend.config import MediaConfig
from penstock_frontend.processing.media.http_client import Fetcher
from tests.fakes.patience import PATIENCE
from tests.fuzz.blame import Blame
from tests.fuzz.media.hosts import ANSWERS, Hosts
from tests.fuzz.media.items import MAX_BYTES
from tests.fuzz.media.names import PUBLIC, PUBLIC_NETWORK

BLAME = Blame(frozenset({"MEDIA_TOO_LARGE"}), taken=False, paths=("mixed.parts[1]",))


@pytest.mark.parametrize(
    ("code", "reason", "field", "message", "right"),
    [
        (
            "INVALID_ARGUMENT",
            "MEDIA_TOO_LARGE",
            "mixed.parts[1].media.data",
            "it has 9 pixels; media.max_pixels is 4",
            True,
        ),
        ("RESOURCE_EXHAUSTED", "QUEUE_FULL", "", "no room", True),
        ("INVALID_ARGUMENT", "MEDIA_TOO_LARGE", "mixed.parts[1].media.data", "it is too large", False),
        ("INVALID_ARGUMENT", "MEDIA_TOO_LARGE", "mixed.parts[0]", "it has 9 pixels; media.max_pixels is 4", False),
        ("INVALID_ARGUMENT", "MEDIA_UNREADABLE", "mixed.parts[1]", "it is broken", False),
        ("UNAVAILABLE", "MEDIA_TOO_LARGE", "mixed.parts[1]", "it has 9 pixels; media.max_pixels is 4", False),
        ("INTERNAL", "INTERNAL", "", "incident", False),
    ],
)
def test_an_error_is_the_clients_and_says_what_is_wrong(
    code: str, reason: str, field: str, message: str, right: bool
) -> None:
    assert (not BLAME.of_status(code, reason, field, message)) is right


def test_media_that_must_be_refused_are_not_answered() -> None:
    assert BLAME.of_answer()
    assert not BLAME._replace(taken=True).of_answer()
    assert Blame(frozenset(), taken=True).of_status("INVALID_ARGUMENT", "MEDIA_UNREADABLE", "a", "b")


def fetcher_of(hosts: Hosts, seconds: float) -> Fetcher:
    async def resolver(host: str, port: int) -> list[str]:
        return [PUBLIC]

    config = MediaConfig(
        allowed_domains=(f"images.test:{hosts.port}",),
        allowed_private_networks=(PUBLIC_NETWORK,),
        max_bytes=MAX_BYTES,
        fetch_timeout=seconds,
    )
    return Fetcher(config, resolver)


async def test_fetches_from_every_hostile_host_end_with_a_clients_error() -> None:
    async with Hosts() as hosts:
        fetcher = fetcher_of(hosts, 1.0)
        urls = [f"http://images.test:{hosts.port}/{path}/1" for path in ANSWERS]
        found = await asyncio.gather(*(fetcher.fetch(url, field="url") for url in urls), return_exceptions=True)
        while hosts.num_open:
            await asyncio.sleep(0.01)
    assert [each for each in found if not isinstance(each, bytes | RequestFailed)] == []
    reasons = {each.reason for each in found if isinstance(each, RequestFailed)}
    assert reasons <= {"MEDIA_FETCH_FAILED", "MEDIA_TOO_LARGE", "MEDIA_NOT_ALLOWED"}
    files = {path for path, each in zip(ANSWERS, found, strict=True) if isinstance(each, bytes)}
    assert files <= {"bomb", "latin", "page"}


@pytest.mark.parametrize(
    "path",
    [
        "one-byte-chunks",
        "chunk-extensions",
        "long-extension",
        "endless-trailers",
        "short-headers",
        "continue-row",
        "to-chunks",
    ],
)
async def test_hosts_that_send_much_with_little_content_are_given_up_before_the_timeout(path: str) -> None:
    async with Hosts() as hosts:
        fetcher = fetcher_of(hosts, PATIENCE)
        with pytest.raises(InvalidArgument, match="the host sends more than"):
            await fetcher.fetch(f"http://images.test:{hosts.port}/{path}/1", field="url")
