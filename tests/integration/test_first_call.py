"""The chart's test hook: a gRPC call and an HTTP call, for every task of the model and every kind of credentials."""

import array
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.common.v1 import finish_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.config.sections import ServerConfig
from penstock_frontend.config import AuthConfig, HttpConfig
from penstock_frontend.rpc import first_call
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.network.certificates import Authority
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE

KEY = "sk-alice-0123456789"


@asynccontextmanager
async def serving(model: Path, engine: str, **options: Any) -> AsyncIterator[list[str]]:
    """Yield a frontend, and the hook's arguments for connecting to the frontend."""
    options.setdefault("http", HttpConfig(host="127.0.0.1", port=0))
    async with FrontendServer(model, engines=[engine], **options) as server:
        ports = (server.frontend.port, server.frontend.http_port)
        arguments = [f"--{name}=127.0.0.1:{port}" for name, port in zip(("grpc", "http"), ports, strict=True)]
        yield [*arguments, "--prompt=hello", f"--timeout={PATIENCE}"]


async def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Return the exit code and the printed lines, without log lines of the frontend in the same process."""
    code = await asyncio.to_thread(first_call.main, arguments)
    told = ("gRPC ", "HTTP ", "FAILED: ", "no answer ")
    return code, [line for line in capsys.readouterr().out.splitlines() if line.startswith(told)]


def embedder() -> FakeEngine:
    """Yield an engine that answers every input with the same vector."""
    engine = FakeEngine(vocab_size=byte_level().get_vocab_size())
    engine.ready.capabilities[:] = ["embed"]

    def answer(output: pb.EngineCoreOutput) -> pb.EngineCoreOutput:
        engine.take(output.request_id)
        data = array.array("f", [0.5, -0.25, 3.0]).tobytes()
        vector = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[3], inline=data)
        stop = finish_pb2.FINISH_REASON_STOP
        return pb.EngineCoreOutput(request_id=output.request_id, pooling_output=vector, finish_reason=stop)

    engine.mangle = answer
    return engine


async def test_a_model_that_generates_is_called_over_both_protocols(
    engine: FakeEngine, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(model, engine.address) as arguments:
        code, (grpc, http) = await run([*arguments, "--max-tokens=3"], capsys)
    assert code == 0
    assert grpc.startswith("gRPC 127.0.0.1:")
    assert http.startswith("HTTP 127.0.0.1:")
    assert ": model generated " in grpc
    assert ": model generated " in http


async def test_a_model_that_embeds_is_called_over_both_protocols(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with embedder() as engine, serving(model, engine.address) as arguments:
        code, lines = await run(arguments, capsys)
    assert code == 0
    assert [line.partition(": ")[2] for line in lines] == ["model returned an embedding of shape [3]"] * 2


@pytest.mark.parametrize("name", ["llm.example.org", "*.example.org"])
async def test_the_certificate_that_frontends_show_is_trusted_itself_and_no_other(
    engine: FakeEngine, model: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority()
    own, other = (authority.issue(name).write(tmp_path / folder) for folder in ("own", "other"))
    tls = own.server(mutual=False)
    server, http = ServerConfig(host="127.0.0.1", tls=tls), HttpConfig(host="127.0.0.1", port=0, tls=tls)
    async with serving(model, engine.address, server=server, http=http) as arguments:
        assert (await run([*arguments, f"--certificate={own.certificate}"], capsys))[0] == 0
        code, (line,) = await run([*arguments, f"--certificate={other.certificate}", "--timeout=1"], capsys)
    assert (code, line) == (1, "no answer within 1 s; check that engines are ready, and that the certificate is theirs")


async def test_a_key_is_shown_and_missed_by_name(
    engine: FakeEngine, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text(f"{KEY} name=alice\n")
    (tmp_path / "key").write_text(f"{KEY}\n")
    async with serving(model, engine.address, auth=AuthConfig(api_keys=str(tmp_path / "keys"))) as arguments:
        assert (await run([*arguments, f"--key-file={tmp_path / 'key'}"], capsys))[0] == 0
        code, (line,) = await run(arguments, capsys)
    assert code == 1
    assert "UNAUTHENTICATED" in line
    assert "test.keySecret.name" in line


async def test_it_waits_for_an_engine_that_comes_later(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = embedder()
    port = free_port()
    async with serving(model, f"127.0.0.1:{port}", engine_wait_timeout=PATIENCE) as arguments:
        waiting = asyncio.create_task(run(arguments, capsys))
        await late.start(port)
        code, lines = await waiting
    await late.kill()
    assert (code, len(lines)) == (0, 2)


async def test_what_does_not_answer_is_told_with_what_to_look_at(
    engine: FakeEngine, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(model, engine.address, http=HttpConfig(port=-1)) as (grpc, *_):
        code, (line,) = await run([grpc, f"--http=127.0.0.1:{free_port()}"], capsys)
    assert code == 1
    assert line.startswith("FAILED: HTTP 127.0.0.1:")
    assert line.endswith("Connection refused")
