"""Messages that people read after a failed call or a wrong command line."""

from pathlib import Path

import pytest

from penstock_frontend.config.limits import AuthConfig
from tests.clients.running import Client, ended, read
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.fake_inference import BUSY, HOLD, FakeInference
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.models.small_tokenizers import byte_level, save_model
from tests.fakes.network.certificates import Authority, Identity
from tests.fakes.network.tcp_proxy import TcpProxy

pytestmark = pytest.mark.slow

KEY = "sk-alice-0123456789"


async def test_a_wrong_field_is_named(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "generate", "--temperature", "900", "hello")
    message = "sampling_params.temperature is 900; it must be from 0 to 100"
    assert (done.code, done.out) == (1, "\n")
    assert done.err.splitlines() == [
        f"INVALID_ARGUMENT: {message}",
        "  reason: INVALID_FIELD",
        "  field: sampling_params.temperature",
    ]


async def test_a_full_queue_says_when_to_retry(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "generate", BUSY)
    assert done.code == 1
    assert done.err.splitlines()[1:] == ["  reason: QUEUE_FULL", "  retry after: 2.5 s"]


async def test_a_server_that_is_not_there_is_unavailable(client: Client, server: FakeInference) -> None:
    await server.stop()
    done = await client.run(server.address, "generate", "hello")
    assert (done.code, done.err.split(":")[0]) == (1, "UNAVAILABLE")


async def test_a_server_that_goes_away_in_the_middle_of_a_text_is_told(client: Client, server: FakeInference) -> None:
    cable = TcpProxy(int(server.address.rpartition(":")[2]))
    await cable.start()
    try:
        process = await client.start(f"127.0.0.1:{cable.port}", "generate", f"one two {HOLD}")
        await read(process, "one two")
        cable.refuse()
        cable.cut()
        done = await ended(process)
    finally:
        await cable.close()
    assert (done.code, done.out, done.err.split(":")[0]) == (1, "\n", "UNAVAILABLE")


async def test_a_key_goes_into_the_metadata(client: Client, server: FakeInference) -> None:
    assert (await client.run(server.address, "generate", "hello", key="sesame")).code == 0
    assert (await client.run(server.address, "generate", "hello")).code == 0
    assert server.keys == ["Bearer sesame", ""]


@pytest.fixture(scope="module")
def authority() -> Authority:
    """Return the authority that signed the server's certificate."""
    return Authority()


async def test_a_connection_is_encrypted_and_the_server_known_by_its_certificate(
    client: Client, authority: Authority, tmp_path: Path
) -> None:
    identity: Identity = authority.issue("localhost")
    fake = FakeInference(tls=(identity.key, identity.certificate))
    await fake.start()
    files = identity.write(tmp_path / "right")
    other = Authority().issue("localhost").write(tmp_path / "wrong")
    try:
        assert await client.run(fake.address, "generate", "--ca", files.ca, "the ferry") == (0, "the ferry\n", "")
        untrusted = [
            await client.run(fake.address, "generate", *flags, "the ferry") for flags in (["--tls"], ["--ca", other.ca])
        ]
    finally:
        await fake.stop()
    for done in untrusted:
        assert done.code == 1
        assert "UNAVAILABLE: " in done.err
    assert len(fake.requests) == 1


async def test_a_file_that_is_not_there_is_named(client: Client, server: FakeInference) -> None:
    done = await client.run(server.address, "generate", "--ca", "/no/such.pem", "hello")
    assert done.code in (1, 2)
    assert "/no/such.pem" in done.err
    assert len(done.err.splitlines()) < 4, "a stack trace is not for people"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate"], []),
        (["generate", "--max-tokens", "many", "hello"], ["--max-tokens", "many"]),
        (["generate", "--max-tokens", "-1", "hello"], ["--max-tokens", "-1"]),
        (["generate", "--seed", str(2**63), "hello"], ["--seed", str(2**63)]),
        (["generate", "--temperature", "warm", "hello"], ["--temperature", "warm"]),
        (["generate", "--timeout", "0", "hello"], ["--timeout", "0"]),
        (["generate", "--no-such", "hello"], ["no-such"]),
        (["sing", "hello"], ["sing"]),
        (["load", "--at-once", "0", "hello"], ["--at-once", "0"]),
        (["load", "--calls", "3", "--for", "3", "hello"], ["--calls", "--for"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
async def test_an_invalid_command_line_prints_the_usage(
    client: Client, server: FakeInference, arguments: list[str], told: list[str]
) -> None:
    done = await client.run(server.address, *arguments)
    assert (done.code, done.out) == (2, "")
    assert "usage" in done.err.lower()
    assert all(word in done.err for word in told), done.err
    assert server.requests == []


async def test_an_unknown_key_is_refused(client: Client, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    file = tmp_path / "keys.txt"
    file.write_text(f"{KEY} name=alice tenant=acme\n")
    async with (
        FakeEngine(vocab_size=byte_level().get_vocab_size()) as engine,
        FrontendServer(model, engines=[engine.address], auth=AuthConfig(api_keys=str(file))) as frontend,
    ):
        address = f"127.0.0.1:{frontend.frontend.port}"
        right = await client.run(address, "generate", "--max-tokens", "1", "hello", key=KEY)
        wrong = await client.run(address, "generate", "hello", key="sk-somebody-9876543210")
        none = await client.run(address, "generate", "hello")
    assert right.code == 0, right.err
    for done in (wrong, none):
        assert (done.code, done.err.split(":")[0]) == (1, "UNAUTHENTICATED")
        assert "  reason: CREDENTIALS_" in done.err
