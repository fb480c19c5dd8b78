"""``penstock lora`` against an admin API with scripted answers, and the flags of ``penstock serve``."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.admin.v1 import messages_pb2 as pb
from penstock.admin.v1 import service_pb2_grpc
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import AlreadyExists, ConfigError, NotFound, PenstockError
from penstock_common.rpc.server import RpcServer
from penstock_frontend.config import FrontendConfig
from penstock_local.cli import build_parser, main
from penstock_local.commands.lora import parse_adapters, parse_directory
from penstock_local.serving.plan import plan
from penstock_local.serving.serve_options import ServeOptions

PIRATE = pb.LoraInfo(
    name="pirate",
    path="/a/pirate",
    digest=bytes(16),
    rank=8,
    modules=["q_proj"],
    num_bytes=3 * 1024 * 1024,
    pinned=True,
    source=pb.LORA_SOURCE_RUN_TIME,
    engine_ids=["engine-0", "engine-1"],
)
POET = pb.LoraInfo(name="poet", path="/a/poet", source=pb.LORA_SOURCE_CONFIG)


class FakeAdmin(service_pb2_grpc.AdminServiceServicer):
    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: PenstockError | None = None
        self.address = ""

    def _take(self, request: Any) -> None:
        self.asked.append(request)
        if self.error is not None:
            raise self.error

    async def LoadLora(self, request: Any, context: Any) -> pb.LoadLoraResponse:
        self._take(request)
        return pb.LoadLoraResponse(lora=PIRATE)

    async def UnloadLora(self, request: Any, context: Any) -> pb.UnloadLoraResponse:
        self._take(request)
        return pb.UnloadLoraResponse(lora=PIRATE)

    async def ListLoras(self, request: Any, context: Any) -> pb.ListLorasResponse:
        self._take(request)
        return pb.ListLorasResponse(names=["pirate", "poet"], loras=[PIRATE, POET])

    async def PinLora(self, request: Any, context: Any) -> pb.PinLoraResponse:
        self._take(request)
        return pb.PinLoraResponse(lora=PIRATE)

    async def run(self, action: str, *arguments: str) -> int:
        return await asyncio.to_thread(main, ["lora", action, "--admin-address", self.address, *arguments])


@pytest.fixture
async def admin() -> AsyncIterator[FakeAdmin]:
    admin = FakeAdmin()  # type: ignore[abstract]
    rpc = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=())
    service_pb2_grpc.add_AdminServiceServicer_to_server(admin, rpc.server)
    admin.address = f"127.0.0.1:{await rpc.start()}"
    yield admin
    await rpc.stop(0)


@pytest.mark.parametrize(
    ("arguments", "asked", "told"),
    [
        (
            ["load", "pirate", "/a/pirate"],
            pb.LoadLoraRequest(name="pirate", path="/a/pirate"),
            "pirate: loaded from /a/pirate, rank 8, ",
        ),
        (
            ["load", "pirate", "/a/pirate", "--inplace", "--pin"],
            pb.LoadLoraRequest(name="pirate", path="/a/pirate", load_inplace=True, pinned=True),
            "pirate: loaded from /a/pirate, rank 8, ",
        ),
        (["unload", "pirate"], pb.UnloadLoraRequest(name="pirate"), "pirate: unloaded\n"),
        (["pin", "pirate"], pb.PinLoraRequest(name="pirate"), "pirate: pinned\n"),
        (["pin", "pirate", "--unpin"], pb.PinLoraRequest(name="pirate", unpin=True), "pirate: not pinned\n"),
    ],
)
async def test_it_asks_for_what_it_is_told_to_and_says_so(
    admin: FakeAdmin, capsys: pytest.CaptureFixture[str], arguments: list[str], asked: Any, told: str
) -> None:
    assert await admin.run(*arguments) == 0
    assert admin.asked == [asked]
    said = capsys.readouterr()
    assert said.out.startswith(told)
    assert said.err == ""


async def test_a_path_that_is_found_here_is_made_absolute(
    admin: FakeAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pirate").mkdir()
    monkeypatch.chdir(tmp_path)
    await admin.run("load", "pirate", "pirate")
    await admin.run("load", "pirate", "elsewhere")
    assert [request.path for request in admin.asked] == [str(tmp_path / "pirate"), "elsewhere"]


async def test_adapters_are_a_table(admin: FakeAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    assert await admin.run("list") == 0
    head, pirate, poet = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "source", "rank", "size", "pinned", "engines", "path"]
    assert pirate.split()[0] == "pirate"
    assert pirate.split()[-3:] == ["yes", "engine-0,engine-1", "/a/pirate"]
    assert poet.split() == ["poet", "config", "-", "-", "no", "-", "/a/poet"]


async def test_adapters_are_json_for_programs(admin: FakeAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    assert await admin.run("list", "--json") == 0
    pirate, poet = json.loads(capsys.readouterr().out)
    assert pirate["engine_ids"] == ["engine-0", "engine-1"]
    assert (pirate["digest"], pirate["num_bytes"], pirate["modules"]) == ("00" * 16, 3 * 1024 * 1024, ["q_proj"])
    assert (poet["digest"], poet["source"]) == ("", "config")


async def test_a_refusal_is_told(admin: FakeAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.error = NotFound("name is 'poets', which is not a LoRA adapter", field="name")
    assert await admin.run("unload", "poets") == 1
    assert "NOT_FOUND: name is 'poets', which is not a LoRA adapter" in capsys.readouterr().err


async def test_what_helps_where_a_name_is_taken_is_told_as_the_flag(
    admin: FakeAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "name is taken; set load_inplace to replace it"
    admin.error = AlreadyExists(message, field="name", reason="LORA_NAME_TAKEN")
    assert await admin.run("load", "pirate", "/a/other") == 1
    assert capsys.readouterr().err.endswith("name is taken; use --inplace to replace it\n")


async def test_a_port_of_another_api_is_told(admin: FakeAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["generate", "hi", "--address", admin.address]) == 1
    assert (
        f"{admin.address} does not support this call: the public API listens on --grpc-port" in capsys.readouterr().err
    )


async def test_a_port_of_the_public_api_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    rpc = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=())
    address = f"127.0.0.1:{await rpc.start()}"
    assert await asyncio.to_thread(main, ["lora", "list", "--admin-address", address]) == 1
    await rpc.stop(0)
    assert f"{address} does not support this call: the admin API listens on --admin-port" in capsys.readouterr().err


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters" / "pirate"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_flags_name_directories_of_adapters(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(adapter.parent)
    assert parse_adapters(["a=pirate", f"b={adapter}"]) == {"a": str(adapter), "b": str(adapter)}
    assert parse_directory(".") == str(adapter.parent)
    assert (parse_adapters([]), parse_directory("")) == ({}, "")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["pirate"], "write NAME=PATH"),
        (["=x"], "write NAME=PATH"),
        (["x="], "write NAME=PATH"),
        (
            ["x=/none"],
            "--lora x=/none: directory /none does not exist; an adapter must be a local directory in PEFT's format",
        ),
        (["x={}/.."], "/.. has no adapter_config.json: the directory does not contain a LoRA adapter"),
        (["a\tb={}"], r"the name 'a\\tb' must be printable"),
        (["x={}", "x={}"], "'x' is already given to "),
    ],
)
def test_flags_that_name_none_are_refused(adapter: Path, texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_adapters([text.format(adapter) for text in texts])


def test_a_model_is_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ConfigError,
        match=f"{tmp_path} has no adapter_config.json: the directory contains a model; serve the model as MODEL",
    ):
        parse_adapters([f"x={tmp_path}"])


def test_an_adapter_is_no_directory_of_adapters(adapter: Path) -> None:
    with pytest.raises(
        ConfigError, match="this is the directory of one adapter; give its parent directory, or use --lora NAME="
    ):
        parse_directory(str(adapter))
    (adapter / "checkpoint-500").mkdir()
    (adapter / "checkpoint-500" / "adapter_config.json").write_text("{}")
    assert parse_directory(str(adapter)) == str(adapter)


def test_the_models_own_name_is_no_adapters(adapter: Path) -> None:
    with pytest.raises(ConfigError, match="--lora pirate=...: 'pirate' is the model's own name"):
        ServeOptions(model=str(adapter), lora={"pirate": str(adapter)})


def test_a_further_name_of_the_model_is_no_adapters(adapter: Path) -> None:
    with pytest.raises(ConfigError, match="--served-model-name pirate and --lora pirate=... are the same name"):
        ServeOptions(model="org/name", served_model_name=("a", "pirate"), lora={"pirate": str(adapter)})


def test_a_directory_must_be_there() -> None:
    with pytest.raises(ConfigError, match="--lora-directory /none: this directory does not exist"):
        parse_directory("/none")


def test_services_are_told_of_adapters(adapter: Path) -> None:
    options = ServeOptions(model=str(adapter), lora={"a": str(adapter)}, lora_directory=str(adapter.parent))
    coordinator, engine, frontend = plan(options, internal_ports=[1, 2], cores=2)
    assert "lora" not in coordinator.config
    assert engine.config["lora"] == {"max_loras": 8}
    assert frontend.config["lora"] == {
        "adapters": {"a": str(adapter)},
        "directory": str(adapter.parent),
        "roots": [str(adapter.parent)],
    }
    for spec in plan(ServeOptions(model=str(adapter)), internal_ports=[1, 2], cores=2):
        assert "lora" not in spec.config
    assert "lora" in FrontendConfig.__struct_fields__


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["bench"]])
def test_commands_name_an_adapter_beside_the_model(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    both = build_parser().parse_args([*command, "--lora", "pirate", "--model", "m"])
    assert (both.model, both.lora) == ("m", "pirate")
    neither = build_parser().parse_args(command)
    assert (neither.model, neither.lora) == ("", None)
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([*command, "--lora", ""])
    assert ended.value.code == 2
    assert "argument --lora: the name is empty" in capsys.readouterr().err
