"""Clients of these contracts against a server of the last release: common features work, and unknown ones get an error."""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator

import pytest

from tests.clients.languages import BUILD, ROOT, install_wheel, run
from tests.clients.running import Client
from tests.contract.words import released

pytestmark = pytest.mark.slow

CONTRACTS = released().name.removesuffix(".words.json") + ".binpb"


def commit() -> str:
    """Return the commit that stored the contracts of the last release; empty if the history is missing."""
    asked = ["git", "log", "--diff-filter=A", "--format=%H", "--", f"protos/released/{CONTRACTS}"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a frontend of the last release, with its own sources and stubs."""
    if not (found := commit()):
        pytest.skip("the history of the repository is not here (git fetch --unshallow)")
    tree = tmp_path_factory.mktemp("release")
    archive = subprocess.run(
        ["git", "archive", found, "services", "tests/fakes"], cwd=ROOT, check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(tree, filter="data")
    stubs = tmp_path_factory.mktemp("stubs")
    kept = str(ROOT / "protos/released" / CONTRACTS)
    run([sys.executable, str(ROOT / "protos/stubs"), "--out", str(stubs), "--released", kept, "python"])
    install_wheel(stubs, stubs / "site")
    path = [stubs / "site", *sorted((tree / "services").iterdir()), tree]
    log = BUILD / "last_release.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/clients/last_release.py"), str(tree / "model")],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as server,
    ):
        assert server.stdout is not None
        port = next((line.split()[1] for line in server.stdout if line.startswith("port ")), "")
        assert port, log.read_text()
        yield f"127.0.0.1:{port}"
        assert server.stdin is not None
        server.stdin.close()
        server.stdout.read()


async def test_a_text_comes(client: Client, address: str) -> None:
    first = await client.run(address, "generate", "--max-tokens", "9", "--seed", "3", "hello")
    again = await client.run(address, "generate", "--max-tokens", "9", "--seed", "3", "hello")
    assert (first.code, first.err) == (0, "")
    assert first == again


async def test_a_session_ends(client: Client, address: str) -> None:
    done = await client.run(address, "session", "--max-tokens", "5", "--seed", "3", "hello", "hi")
    assert (done.code, done.err) == (0, "")
    assert {line[:3] for line in done.out.splitlines() if line.startswith("[")} == {"[0]", "[1]"}


async def test_many_calls_end(client: Client, address: str) -> None:
    done = await client.run(address, "load", "--max-tokens", "5", "--at-once", "4", "--calls", "20", "hello")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("calls: 20, failed: 0, ")


async def test_an_error_is_told_with_its_details(client: Client, address: str) -> None:
    done = await client.run(address, "generate", "--temperature", "-1", "hello")
    assert done.code == 1
    assert done.err.splitlines()[1] == "  reason: INVALID_FIELD"
    assert "  field: sampling_params.temperature" in done.err
