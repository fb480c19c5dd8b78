"""``penstock scale`` against an admin API with scripted answers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.admin.v1 import messages_pb2, service_pb2_grpc
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import FailedPrecondition, InvalidArgument, PenstockError, Unavailable, Unimplemented
from penstock_common.rpc.server import RpcServer
from penstock_local.cli import main
from penstock_local.serving.machine_resources import free_ports


class FakeAdmin(service_pb2_grpc.AdminServiceServicer):
    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.keys: list[str] = []
        self.error: PenstockError | None = None
        self.previous = 2
        self.address = ""

    async def Scale(self, request: Any, context: Any) -> messages_pb2.ScaleResponse:
        assert request.HasField("replicas")
        self.asked.append((request.pool, request.replicas))
        self.keys += [value for key, value in context.invocation_metadata() if key == "authorization"]
        if self.error is not None:
            raise self.error
        return messages_pb2.ScaleResponse(previous_replicas=self.previous)

    async def run(self, *arguments: str) -> int:
        return await asyncio.to_thread(main, ["scale", "--admin-address", self.address, *arguments])


@pytest.fixture
async def admin() -> AsyncIterator[FakeAdmin]:
    admin = FakeAdmin()  # type: ignore[abstract]
    rpc = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=())
    service_pb2_grpc.add_AdminServiceServicer_to_server(admin, rpc.server)
    admin.address = f"127.0.0.1:{await rpc.start()}"
    yield admin
    await rpc.stop(0)


async def test_it_tells_what_was_wanted_and_what_is(admin: FakeAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    assert await admin.run("5") == 0
    assert await admin.run("--pool", "spot", "1") == 0
    admin.previous = 1
    assert await admin.run("4", "--pool=spot") == 0
    assert admin.asked == [("default", 5), ("spot", 1), ("spot", 4)]
    told = capsys.readouterr()
    assert told.err == ""
    assert told.out.splitlines() == [
        "pool default: 2 engines wanted before, 5 now",
        "pool spot: 2 engines wanted before, 1 now",
        "pool spot: 1 engine wanted before, 4 now",
    ]


async def test_zero_is_a_number_and_comes_with_how_to_get_back(
    admin: FakeAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await admin.run("0", "--pool", "spot") == 0
    assert admin.asked == [("spot", 0)]
    told = capsys.readouterr()
    assert told.out == "pool spot: 2 engines wanted before, 0 now\n"
    assert "new requests do not start an engine: `penstock scale --pool spot 1` starts one again" in told.err


async def test_a_key_of_the_environment_is_shown(admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "sk-oncall")
    assert await admin.run("5") == 0
    assert admin.keys == ["Bearer sk-oncall"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            InvalidArgument("pool is 'spto'; existing pools: default, spot; did you mean 'spot'?", field="pool"),
            "INVALID_ARGUMENT: pool is 'spto'; existing pools: default, spot; did you mean 'spot'?",
        ),
        (FailedPrecondition("it belongs to ScaledObject s"), "FAILED_PRECONDITION: it belongs to ScaledObject s"),
        (Unavailable("the coordinator is away", retry_after=1.0), "the coordinator is away; try again in 1 s"),
        (Unimplemented("Scale is not supported yet"), "UNIMPLEMENTED: Scale is not supported yet"),
    ],
)
async def test_what_the_server_refuses_is_said_in_its_words(
    admin: FakeAdmin, error: PenstockError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.error = error
    assert await admin.run("5") == 1
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "the following arguments are required: N"),
        (("many",), "argument N: invalid integer value: 'many'"),
        (("1.5",), "argument N: invalid integer value: '1.5'"),
        (("-1",), "argument N: -1 is out of range; it must be from 0 to 4294967295"),
        (("4294967296",), "argument N: 4294967296 is out of range; it must be from 0 to 4294967295"),
        (("1", "2"), "unrecognized arguments: 2"),
        (("1", "--pol", "a"), "did you mean '--pool'?"),
    ],
)
def test_a_number_that_is_none_is_named(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["scale", *arguments])
    assert exit_info.value.code == 2
    assert said in capsys.readouterr().err


def test_a_pool_without_a_name_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "5", "--pool", ""]) == 2
    assert "--pool is required" in capsys.readouterr().err


def test_nothing_listening_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert main(["scale", "5", "--admin-address", f"127.0.0.1:{port}"]) == 1
    err = capsys.readouterr().err
    assert f"no connection to 127.0.0.1:{port}" in err
    assert "Is a frontend running?" in err
