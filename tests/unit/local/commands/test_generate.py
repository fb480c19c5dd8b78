"""``penstock generate`` against a real gRPC server without a model."""

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.common.v1 import sampling_pb2
from penstock.inference.v1 import service_pb2_grpc
from penstock_common.config.sections import ServerConfig
from penstock_common.rpc.server import RpcServer
from penstock_local.cli import build_parser, main
from penstock_local.commands.generate import GenerateOptions, generate
from penstock_local.serving.machine_resources import free_ports
from tests.fakes.clients.command import PENSTOCK
from tests.fakes.patience import PATIENCE, deadlines
from tests.fakes.systems.services.fake_service import FakeInference


class Server:
    def __init__(self, address: str, inference: FakeInference) -> None:
        self.address = address
        self.inference = inference


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    rpc = RpcServer(ServerConfig(host="127.0.0.1"), service_names=())
    inference = FakeInference()  # type: ignore[abstract]
    service_pb2_grpc.add_InferenceServiceServicer_to_server(inference, rpc.server)
    port = await rpc.start()
    yield Server(f"127.0.0.1:{port}", inference)
    await rpc.stop(0)


async def test_text_goes_to_standard_output_and_the_rest_to_standard_error(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await generate(GenerateOptions(prompt="one two three", address=server.address)) == 0
    out, err = capsys.readouterr()
    assert out == "one two three\n"
    assert err.startswith("[length · 3 prompt tokens (1 cached) · 3 new tokens · ")


async def test_only_the_given_settings_are_sent(server: Server) -> None:
    options = GenerateOptions(
        prompt="x", address=server.address, model="m", lora="l", sampling={"temperature": 1.0, "stop": ["."]}
    )
    await generate(options)
    (request,) = server.inference.requests
    assert (request.model, request.lora) == ("m", "l")
    assert {field.name for field, _ in request.sampling_params.ListFields()} == {"temperature", "stop"}


async def test_several_outputs_are_numbered_in_their_order(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await generate(GenerateOptions(prompt="one two", address=server.address, sampling={"n": 3})) == 0
    out, err = capsys.readouterr()
    assert out == "[1] one two\n[2] one two\n[3] one two\n"
    assert err.startswith("[3 outputs: 3 length · 2 prompt tokens (1 cached) · 6 new tokens · ")


async def test_log_probabilities_are_a_table_on_standard_error(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    await generate(GenerateOptions(prompt="one two", address=server.address, sampling={"logprobs": 1}))
    out, err = capsys.readouterr()
    assert out == "one two\n"
    assert err.splitlines()[:3] == [
        "token   logprob  rank  likeliest",
        "'one'   -0.0000     1  ' likely' 0.00",
        "' two'  -1.0000     2  ' likely' 0.00",
    ]


async def test_the_table_of_each_of_several_outputs_has_its_number(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    await generate(GenerateOptions(prompt="one", address=server.address, sampling={"n": 2, "logprobs": 0}))
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith(("[1]", "[2]"))] == ["[1]", "[2]"]


@pytest.fixture
def folder_with_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a working directory with a file ``schema.json``."""
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    monkeypatch.chdir(tmp_path)


async def sent(server: Server, *flags: str) -> sampling_pb2.SamplingParams:
    """Return the sampling parameters that the command sends to the server."""
    assert await asyncio.to_thread(main, ["generate", "x", "--address", server.address, *flags]) == 0
    return server.inference.requests[-1].sampling_params


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (
            ["--n", "2", "--logprobs", "3", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5"],
            {"n": 2, "logprobs": 3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        ),
        (["--repetition-penalty", "1.25"], {"repetition_penalty": 1.25}),
        (["--json"], {"structured_output": {"json_object": True}}),
        (["--json-schema", ' {"type": "null"}'], {"structured_output": {"json_schema": ' {"type": "null"}'}}),
        (["--json-schema", "schema.json"], {"structured_output": {"json_schema": '{"type": "object"}'}}),
        (["--regex", "a+"], {"structured_output": {"regex": "a+"}}),
        (["--choice", "a", "--choice", "b"], {"structured_output": {"choice": {"options": ["a", "b"]}}}),
        (["--grammar", "root ::= [ab]"], {"structured_output": {"grammar": "root ::= [ab]"}}),
        (["--grammar", "schema.json"], {"structured_output": {"grammar": '{"type": "object"}'}}),
    ],
)
async def test_flags_become_fields(
    server: Server, flags: list[str], want: dict[str, Any], folder_with_schema: None
) -> None:
    assert await sent(server, *flags) == sampling_pb2.SamplingParams(max_tokens=256, **want)


def test_a_schema_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--json-schema", "nowhere.json"]) == 2
    assert "--json-schema: cannot read 'nowhere.json': No such file" in capsys.readouterr().err


def test_two_constraints_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        build_parser().parse_args(["generate", "x", "--json", "--regex", "a"])
    assert exit_info.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


async def test_an_error_of_the_server_names_the_field(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await generate(GenerateOptions(prompt="wrong", address=server.address)) == 1
    assert "INVALID_ARGUMENT: sampling_params.top_p is 7; it must be in (0, 1]" in capsys.readouterr().err


async def test_without_a_server_the_message_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert await generate(GenerateOptions(prompt="x", address=f"127.0.0.1:{port}")) == 1
    err = capsys.readouterr().err
    assert f"no connection to 127.0.0.1:{port}" in err
    assert "penstock serve MODEL" in err


async def test_a_deadline_ends_the_request(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for seconds in deadlines():
        assert await generate(GenerateOptions(prompt="wait", address=server.address, timeout=seconds)) == 1
        assert "DEADLINE_EXCEEDED" in capsys.readouterr().err
        if server.inference.requests:
            break
    await asyncio.wait_for(server.inference.cancelled.wait(), PATIENCE)


async def test_an_interrupt_cancels_the_request(server: Server) -> None:
    process = await asyncio.create_subprocess_exec(
        *PENSTOCK, "generate", "wait", "--address", server.address, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.read(4), PATIENCE) == b"wait"
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), PATIENCE) == 130
    await asyncio.wait_for(server.inference.cancelled.wait(), PATIENCE)


async def test_a_prompt_can_come_from_standard_input(server: Server) -> None:
    process = await asyncio.create_subprocess_exec(
        *PENSTOCK,
        *("generate", "-", "--address", server.address),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    out, _ = await asyncio.wait_for(process.communicate("grüße\nalle\n".encode()), PATIENCE)
    assert process.returncode == 0
    assert out.decode() == "grüße alle\n"
    assert server.inference.requests[0].text == "grüße\nalle"


async def test_a_reader_that_goes_away_ends_the_command(server: Server) -> None:
    read, write = os.pipe()
    os.close(read)
    process = await asyncio.create_subprocess_exec(
        *PENSTOCK, "generate", "hello", "--address", server.address, stdout=write, stderr=asyncio.subprocess.PIPE
    )
    os.close(write)
    _, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert (process.returncode, err) == (141, b"")


def test_a_prompt_that_is_not_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert main(["generate", "-"]) == 2
    assert "not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [["--max-tokens", "-1"], ["--max-tokens", "4294967296"], ["--seed", "9223372036854775808"], ["--top-k", "x"]],
)
def test_a_number_that_the_wire_cannot_hold_is_a_usage_error(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        build_parser().parse_args(["generate", "x", *flags])
    assert exit_info.value.code == 2
    assert flags[0] in capsys.readouterr().err
