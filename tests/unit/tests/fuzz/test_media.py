"""Hostile media: made from seed and number alone, half of them over each protocol, and judged by what is wrong with them."""

import asyncio
from collections import Counter

import pytest

from penstock_common.errors import InvalidArgument, RequestFailed
from penstock_frontend.config import MediaConfig
from penstock_frontend.processing.media.http_client import Fetcher
from tests.fakes.patience import PATIENCE
from tests.fuzz.attacks import Attacks
from tests.fuzz.blame import Blame
from tests.fuzz.http_calls import HttpCase
from tests.fuzz.media.attacks import Killing
from tests.fuzz.media.hosts import ANSWERS, REDIRECTS, Hosts
from tests.fuzz.media.items import MAX_BYTES
from tests.fuzz.media.names import PUBLIC, PUBLIC_NETWORK
from tests.fuzz.rpc_calls import Case
from tests.fuzz.variants import SETS, VARIANTS, variant_of

TURNS = SETS["media"]
NUMBERS = range(1500)
BLAME = Blame(frozenset({"MEDIA_TOO_LARGE"}), taken=False, paths=("mixed.parts[1]",))


def call_of(payload: object) -> object:
    return payload.call if isinstance(payload, Killing) else payload


def test_a_request_is_made_from_the_seed_and_its_number_alone() -> None:
    attacks = Attacks(3, TURNS, 12_345)
    in_order = [attacks.make(number) for number in range(120)]
    backwards = [Attacks(3, TURNS, 12_345).make(number) for number in reversed(range(100, 120))]

    assert [(each.attack, each.target, each.payload) for each in in_order[100:]] == [
        (each.attack, each.target, each.payload) for each in reversed(backwards)
    ]


def test_half_come_over_each_protocol_with_every_attack() -> None:
    attacks = Attacks(3, TURNS, 12_345)
    made = [attacks.make(number) for number in NUMBERS]
    over = Counter(type(call_of(each.payload)) for each in made)
    names = {each.attack for each in made}

    assert abs(over[Case] - over[HttpCase]) < len(NUMBERS) / 8
    assert {
        "truncated",
        "flipped",
        "bomb",
        "other format",
        "other modality",
        "tensors",
        "frames",
        "sound bomb",
    } <= names
    assert {"url", "name", "host endless", "host redirect", "placeholders", "too many", "session", "processed"} <= names
    assert any(name.startswith("killed") for name in names)
    targets = {each.target for each in made}
    assert {f"http /v1/{path}" for path in ("chat/completions", "responses", "messages", "embeddings")} <= targets
    assert {f"inference.v1.{name}" for name in ("Chat", "Generate", "Embed")} <= targets


def test_what_a_variant_does_not_take_is_not_left_out() -> None:
    attacks = Attacks(3, TURNS, 12_345)
    found = {variant_of(number, TURNS) for number in NUMBERS if attacks.make(number).attack == "other modality"}

    assert found == {name for name in VARIANTS if VARIANTS[name].media}


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


def test_what_must_be_refused_is_not_answered() -> None:
    assert BLAME.of_answer()
    assert not BLAME._replace(taken=True).of_answer()
    assert Blame(frozenset(), taken=True).of_status("INVALID_ARGUMENT", "MEDIA_UNREADABLE", "a", "b")


async def ask(hosts: Hosts, path: str, address: str = "127.77.0.1") -> bytes:
    reader, writer = await asyncio.open_connection(address, hosts.port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return await reader.read(400)
    except ConnectionError:
        return b"(reset)"
    finally:
        writer.transport.abort()


async def test_a_hostile_host_answers_as_its_paths_say_and_the_private_one_tells_who_came() -> None:
    async with Hosts() as hosts:
        assert (await ask(hosts, "/good/1")).startswith(b"HTTP/1.1 200 OK")
        assert await ask(hosts, "/endless/1")
        assert b"Location: http://127.0.0.1" in await ask(hosts, "/redirect/0")
        assert not hosts.led
        await ask(hosts, "/", "127.0.0.1")
        assert len(hosts.led) == 1
        while hosts.num_open:
            await asyncio.sleep(0.01)
    assert {"endless", "drip", "silence", "loop"} <= ANSWERS.keys()
    assert any("private" in target for target in REDIRECTS)


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
        with pytest.raises(InvalidArgument, match="its host sends more than"):
            await fetcher.fetch(f"http://images.test:{hosts.port}/{path}/1", field="url")
