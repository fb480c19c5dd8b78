"""Adapters from a user's view: the command, the real services, the demo model and its two trained adapters."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import NotFoundError, OpenAI

from penstock_local.serving.machine_resources import free_ports
from tests.fakes.clients.command import PENSTOCK, Command, eventually
from tests.fakes.patience import PATIENCE

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model"
QUESTION = [{"role": "user", "content": "What does a cow eat?"}]

pytestmark = pytest.mark.slow


class Server:
    """A server that looks for adapters in ``folder``."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.folder = folder
        self.openai = OpenAI(base_url=f"http://127.0.0.1:{ports[1]}/v1", api_key="none", max_retries=0)
        self._addresses = (f"localhost:{ports[0]}", f"localhost:{ports[2]}")

    def answer(self, model: str) -> str:
        """Return the answer of ``model`` to the question."""
        said = self.openai.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=60)
        return said.choices[0].message.content or ""

    def run(self, *arguments: str, admin: bool = True) -> str:
        """Run ``penstock ARGUMENTS`` against this server and return its output."""
        flag = "--admin-address" if admin else "--address"
        done = subprocess.run(
            [*PENSTOCK, *arguments, flag, self._addresses[admin]],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    ports, folder = free_ports(3), tmp_path_factory.mktemp("adapters")
    flags = ("--grpc-port", str(ports[0]), "--http-port", str(ports[1]), "--admin-port", str(ports[2]))
    adapters = ("--lora", f"json={DEMO / 'penstock-tiny-json'}", "--lora-directory", str(folder))
    settings = ("--kv-cache-memory", "64MiB", "--device", "cpu", "--set", "frontend.lora.scan_interval=0.2")
    with Command("serve", str(DEMO / "penstock-tiny"), *adapters, *settings, *flags) as command:
        command.wait_for("Ctrl-C stops everything")
        yield Server(folder, ports)


def test_each_name_is_another_model_and_the_base_stays_as_it_is(server: Server) -> None:
    plain = server.answer("penstock-tiny")
    said = server.answer("json")
    assert said.startswith("{")
    assert said.endswith("}")
    assert server.answer("penstock-tiny") == plain
    assert not plain.startswith("{")
    models = {model.id: model for model in server.openai.models.list()}
    assert models["json"].model_extra == models["json"].model_extra | {"parent": "penstock-tiny"}


def test_an_adapter_in_the_directory_has_a_name_and_a_removed_one_has_none(server: Server) -> None:
    with pytest.raises(NotFoundError, match="pirate"):
        server.answer("pirate")
    shutil.copytree(DEMO / "penstock-tiny-pirate", server.folder / "pirate")

    def named() -> bool:
        return "pirate" in {model.id for model in server.openai.models.list()}

    assert eventually(named)
    assert "Ahoy" in server.answer("pirate")
    assert "pirate" in server.run("lora", "list")
    shutil.rmtree(server.folder / "pirate")
    assert eventually(lambda: not named())


def test_operators_load_pin_and_unload(server: Server) -> None:
    path = server.folder / ".later"
    shutil.copytree(DEMO / "penstock-tiny-pirate", path)
    server.run("lora", "load", "parrot", str(path), "--pin")
    assert "Ahoy" in server.answer("parrot")
    prompt = "<|user|>What does a cow eat?<|end|><|assistant|>"
    assert "Ahoy" in server.run("generate", prompt, "--lora", "parrot", admin=False)
    server.run("lora", "unload", "parrot")
    with pytest.raises(NotFoundError):
        server.answer("parrot")
