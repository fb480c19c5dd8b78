"""The commands and programs on documentation pages work with the server that the page or the README starts.

tests/contract/test_docs.py checks the names on the pages without running commands.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_local.serving.machine_resources import free_ports
from tests.documents.pages import ROOT, Block, blocks
from tests.documents.shell import Command as Written
from tests.documents.shell import commands
from tests.fakes.clients.command import Command, eventually
from tests.fakes.patience import PATIENCE

pytestmark = pytest.mark.slow

README_SERVES = "penstock serve examples/demo_model/penstock-tiny --engines 2"
MULTIMODAL_SERVES = "penstock serve examples/demo_model/penstock-tiny-vision"
ADAPTER_SERVES = (
    "penstock serve examples/demo_model/penstock-tiny --lora pirate=examples/demo_model/penstock-tiny-pirate"
    ' --set "frontend.lora.roots=[$PWD]"'
)
SERVER_OF_PAGE = {
    "docs/guides/multimodal.md": MULTIMODAL_SERVES,
    "docs/tutorials/images.md": MULTIMODAL_SERVES,
    "docs/tutorials/first-adapter.md": ADAPTER_SERVES,
}
"""Commands that start the server of a page. Other pages use the server of the README."""
SERVES = (
    "penstock serve examples/demo_model/penstock-tiny ",
    "penstock serve examples/demo_model/penstock-tiny-hybrid",
)
"""Prefixes of the commands that start their own server."""
TLS = "docs/guides/tls.md"

PROGRAMS_NOT_RUN = {
    "make": "its targets are what CI runs",
    "helm": "tests/chart renders the chart",
    "kubectl": "needs a cluster, which tests/cluster has",
    "go": "needs the toolchain",
    "mvn": "needs the toolchain",
    "cargo": "needs the toolchain",
    "mkdir": "makes room for what tar unpacks",
    "tar": "unpacks what needs the toolchain",
    "npm": "needs a package index",
    "node": "tests/clients runs it where its packages are",
    "alias": "the shell's own",
    "client": "tests/clients runs the clients that the pages build",
    "./client": "tests/clients runs the clients that the pages build",
    "build/client": "tests/clients runs the clients that the pages build",
    "cmake": "needs the toolchain",
    "aider": "is not installed here",
    "apt-get": "installs into the machine",
    "cline": "tests/e2e/test_agents.py runs it where it is",
    "hf": "downloads from the hub",
    "pip": "installs into the environment",
    "smg": "tests/e2e/test_gateway.py runs it where it is",
    "source": "the shell's own",
    "cd": "the shell's own",
    "export": "the shell's own",
}
"""Reasons why the tests run no commands of these programs."""
COMMANDS_NOT_RUN = {
    README_SERVES: "is the server of these tests",
    MULTIMODAL_SERVES: "is the server of pages about media",
    "penstock serve MODEL": "MODEL is the reader's",
    "penstock serve examples/demo_model/penstock-tiny --lora": "tests/e2e/test_lora.py does so",
    "penstock serve examples/demo_model/penstock-tiny --served-model-name": "tests/integration/test_aliases.py serves aliases",
    "penstock chat --lora": "needs a server with adapters, as tests/e2e/test_lora.py has one",
    "penstock lora": "tests/e2e/test_lora.py does so, beside a server with adapters",
    "penstock serve Qwen/Qwen3-0.6B sentence": "is on the hub, tests/e2e/test_several_models.py serves two models",
    "penstock serve --models models.yaml": "is on the hub, tests/e2e/test_several_models.py serves two models",
    "penstock chat --model Qwen3-0.6B": "needs a server with two models",
    "curl localhost:8000/v1/embeddings -H 'content-type: application/json' \\\n  -d '{\"model\": \"all-MiniLM": "needs 2 models",
    "penstock serve openai/whisper-large-v3-turbo": "is on the hub",
    "penstock transcribe": "the file is the reader's, tests/unit/frontend/api/grpc/test_transcribe.py has one",
    "curl localhost:8000/v1/audio/transcriptions": "the file is the reader's",
    "penstock scale": "needs a cluster, which tests/integration/test_scale.py has",
    "penstock bench --rate 10 --duration 60": "takes a minute",
    "penstock bench --dataset sharegpt": "the file is the reader's",
    "penstock bench --prompts prompts.jsonl": "the file is the reader's",
    "penstock batch requests.jsonl": "the file is the reader's, tests/integration/test_batch.py has one",
    "penstock serve examples/demo_model/penstock-tiny &": "has the ports that the page's other commands ask",
    "python examples/ray_data/": "needs Ray",
    "openssl rand -hex 32 > secret": "writes nothing to standard output",
    "curl localhost:8200/": "asks a gateway",
    "python -m penstock_": "needs the reader's configuration",
    **dict.fromkeys(
        (
            "python examples/demo_model/train",
            "python examples/demo_model/evaluate.py",
            "python examples/demo_model/eagle3_files.py",
            "python examples/demo_model/pad_model.py",
            "python examples/demo_model/make_adapters.py",
        ),
        "trains for half an hour, or works on what came of it",
    ),
    ".venv/bin/python -m tests.benchmarks.peers": "measures for an hour",
    "python3 tests/device/bare.py": "is for a machine with a GPU",
}
BLOCKS_NOT_RUN = {
    "Qwen/Qwen3-0.6B": "is on the hub",
    "langchain_openai": "has an environment of its own, in tests/clients",
    "llama_index": "has an environment of its own, in tests/clients",
    "speech.mp3": "is the reader's, tests/unit/frontend/api/grpc/test_transcribe.py has a file",
    "speech.m4a": "is the reader's, tests/integration/test_openai_audio.py has a file",
    "register_scheduler": "is a part of a package",
    "register_kv_connector": "is a part of a package",
}
"""Text in a page's program that the tests do not run, with the reason."""


class Defaults:
    """A running server. ``put`` replaces default ports in a page's text by the server's ports."""

    def __init__(self, ports: list[int]) -> None:
        self.grpc, self.http, self.admin = ports

    def put(self, text: str) -> str:
        """Return ``text`` with the ports of this server. Load tests in the text are reduced to a few requests."""
        for default, port in ((50051, self.grpc), (8000, self.http), (50053, self.admin)):
            text = text.replace(f"localhost:{default}", f"localhost:{port}")
        address = f" --address localhost:{self.grpc}"
        text = re.sub(r"penstock (generate|chat|status)\b", rf"penstock \1{address}", text)
        text = re.sub(r"penstock status\b", f"penstock status --admin-address localhost:{self.admin}", text)
        text = re.sub(r"(penstock bench .*)", rf"\1{address} --requests 4 --warmup 0", text)
        return re.sub(r"(python examples/clients/python/client.py generate)", rf"\1{address}", text)


@contextlib.contextmanager
def serving(command: str, cwd: Path | None = None) -> Iterator[Defaults]:
    """Yield the server that a page's command starts, with other ports and a smaller KV cache."""
    assert any(written.text == command for written in commands())
    ports = free_ports(3)
    flags = zip(("--grpc-port", "--http-port", "--admin-port"), map(str, ports), strict=True)
    words = [word.replace("$PWD", str(cwd)) for word in shlex.split(command)]
    arguments = [*words[1:], *(word for pair in flags for word in pair)]
    with Command(*arguments, "--kv-cache-memory", "64MiB", "--device", "cpu", cwd=cwd) as running:
        running.wait_for("Ctrl-C stops everything")
        yield Defaults(ports)


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], Defaults]]:
    """Yield a function that returns the server of a command. One server runs at a time, since pages run one by one."""
    running: dict[str, Defaults] = {}
    with contextlib.ExitStack() as stack:

        def server(command: str) -> Defaults:
            if command not in running:
                stack.close()
                running.clear()
                running[command] = stack.enter_context(serving(command, ROOT))
            return running[command]

        yield server


def server_of(page: str) -> str:
    """Return the command that starts the server of a page."""
    return SERVER_OF_PAGE.get(page, README_SERVES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a reader's working folder: a temporary folder with the repository's files that the pages use."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def environment() -> dict[str, str]:
    """Return the README's activated environment, with the programs of npm and of the test cluster on the path."""
    tools = [ROOT / "node_modules/.bin", *sorted((ROOT / "build/cluster/bin").glob("g*"))]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**kept, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], *map(str, tools)])}


def shell(script: str, folder: Path, stdin: str = "") -> str:
    """Run a script, which must succeed, and return its standard output."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


def reason(command: Written) -> str:
    """Return the reason why the tests do not run a command; ``""`` if the tests run it."""
    programs = [call[0] for call in command.calls]
    if found := next((program for program in programs if program in PROGRAMS_NOT_RUN), ""):
        return PROGRAMS_NOT_RUN[found]
    return next((why for start, why in COMMANDS_NOT_RUN.items() if command.text.startswith(start)), "")


def to_run() -> list[Written]:
    return [command for command in commands() if command.page != TLS and not reason(command)]


def serves(command: Written) -> bool:
    return command.text.startswith(SERVES)


@pytest.mark.parametrize(
    "command", [command for command in to_run() if serves(command)], ids=lambda command: command.place
)
def test_a_server_of_a_page_serves(command: Written, folder: Path) -> None:
    with serving(command.text, folder) as server:
        answer = shell(server.put('penstock generate "Once upon a time" --max-tokens 8'), folder)
    assert answer.strip()


@pytest.mark.parametrize(
    "command", [command for command in to_run() if not serves(command)], ids=lambda command: command.place
)
def test_a_command_does_its_work(command: Written, servers: Callable[[str], Defaults], folder: Path) -> None:
    server = servers(server_of(command.page))
    program = command.calls[0][0]
    if shutil.which(program, path=environment()["PATH"]) is None:
        pytest.skip(f"{program} is not on PATH")
    # Without --fail, curl exits with 0 for any answer, including errors.
    script = re.sub(r"(?<!buf )\bcurl ", "curl -sS --fail-with-body ", server.put(command.text))
    output = shell(script, folder, stdin="What is 12 + 30?\n")
    assert output.strip() or program == "grpcurl"


def programs() -> list[Block]:
    return [
        block for block in blocks("python") if block.page != "docs/guides/clients/python.md" and not left_out(block)
    ]


def left_out(block: Block) -> str:
    return next((why for part, why in BLOCKS_NOT_RUN.items() if part in block.code), "")


@pytest.mark.parametrize("block", programs(), ids=lambda block: block.place)
def test_a_program_writes_what_the_model_says(block: Block, servers: Callable[[str], Defaults], folder: Path) -> None:
    server = servers(server_of(block.page))
    (folder / "program.py").write_text(server.put(block.code))
    assert len(shell("python program.py", folder)) > 10


# The tests below run docs/guides/tls.md, from the certificates to the last command.


def renumbered(text: str, ports: dict[str, str]) -> str:
    return re.sub(r"\b(50050|50051|50052|50053|8000)\b", lambda found: ports[found[0]], text)


def test_the_complete_set_of_files_is_a_deployment_that_knows_who_calls(folder: Path) -> None:
    ports = dict(zip(("50050", "50051", "50052", "50053", "8000"), map(str, free_ports(5)), strict=True))
    for block in blocks("yaml"):
        if block.page == TLS and (named := re.match(r"# (\w+\.yaml)\n", block.code)):
            (folder / named[1]).write_text(renumbered(block.code, ports))
    texts = [command.text for command in commands() if command.page == TLS]
    started = [text for text in texts if text.endswith("&")]
    first = texts.index(started[0])
    shell("\n".join(texts[:first]), folder)
    services = [Process(text.removesuffix("&").split(), folder) for text in started]
    try:
        services[-1].until("[info] serving requests")
        as_clients = "\n".join(texts[first + len(started) :]).replace("curl ", "curl -sS --fail ")
        for default, flags in (
            ("generate", "--address localhost:50051"),
            ("status", "--admin-address localhost:50053"),
        ):
            as_clients = as_clients.replace(f"penstock {default}", f"penstock {default} {flags}")
        as_clients = as_clients.replace("--once", "--once --address localhost:50051")
        output = shell(renumbered(as_clients, ports), folder)
        assert '"id":"penstock-tiny"' in output
        assert re.search(r"SERVING|serving", output)
        without_key = f"curl -sS --cacert tls/edge-ca.crt https://localhost:{ports['8000']}/v1/models"
        assert "invalid_api_key" in shell(without_key, folder)
    finally:
        for service in services:
            service.stop()


class Process:
    """A background service of the reader's shell, with its log in a file."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._log = folder / f"{command[2]}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command[1:]], cwd=folder, env=environment(), stdout=log, stderr=log
            )

    def until(self, text: str) -> None:
        """Wait until the log contains ``text``. Fails with the log if the service exits first."""
        ended = eventually(lambda: text in self._log.read_text() or self._process.poll() is not None)
        assert ended, self._log.read_text()
        assert text in self._log.read_text(), self._log.read_text()

    def stop(self) -> None:
        """Kill the service."""
        self._process.kill()
        self._process.wait()


# The tests below fail for exceptions that no page needs any more.


@pytest.mark.parametrize("program", PROGRAMS_NOT_RUN)
def test_a_program_that_is_left_out_is_still_called(program: str) -> None:
    assert any(call[0] == program for command in commands() for call in command.calls)


@pytest.mark.parametrize("start", COMMANDS_NOT_RUN)
def test_a_command_that_is_left_out_still_stands_in_a_page(start: str) -> None:
    assert any(command.text.startswith(start) for command in commands())


@pytest.mark.parametrize("part", BLOCKS_NOT_RUN)
def test_a_program_of_a_page_that_is_left_out_is_still_there(part: str) -> None:
    assert any(part in block.code for block in blocks("python"))
