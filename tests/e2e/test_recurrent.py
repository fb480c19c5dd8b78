"""A model with recurrent layers as a user serves it: the command, the real services, and OpenAI's client."""

import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock_local.serving.machine_resources import free_ports
from tests.fakes.clients.command import PENSTOCK, Command
from tests.fakes.models.transformers_greedy import greedy_tokens
from tests.fakes.patience import PATIENCE

MODEL = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny-hybrid"
SPAN = 16
NEW_TOKENS = 60
TEXTS = (
    "Once upon a time",
    "Long ago, there was a fox named",
    "The capital of Norway is",
    "Question: What does a rabbit eat?\nAnswer:",
    "12 + 7 =",
)
STORIES = "Mia the rabbit lived in a castle. She loved to read books. Omar the fox made soup. " * 24

pytestmark = pytest.mark.slow


class Server:
    """A server with the hybrid demo model."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.http = f"http://127.0.0.1:{ports[1]}"
        self.grpc, self.admin = f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[2]}"
        self.openai = OpenAI(base_url=f"{self.http}/v1", api_key="none", max_retries=0)

    def complete(self, prompt: str | list[int], count: int) -> str:
        """Return the greedy continuation of a prompt."""
        made = self.openai.completions.create(model=MODEL.name, prompt=prompt, temperature=0, max_tokens=count)
        return made.choices[0].text

    def ask(self, messages: list[dict[str, str]]) -> tuple[str, int, int]:
        """Return the greedy answer to a conversation, and the numbers of prompt tokens and of cached tokens."""
        said: Any = self.openai.chat.completions.create(
            model=MODEL.name,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=30,
        )
        details = said.usage.prompt_tokens_details
        return said.choices[0].message.content, said.usage.prompt_tokens, details.cached_tokens if details else 0

    def metric(self, name: str) -> float:
        """Return the value of a metric with one engine."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=PATIENCE) as page:
            lines = page.read().decode().splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(f"{name}{{")))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    ports = free_ports(3)
    flags = ("--grpc-port", str(ports[0]), "--http-port", str(ports[1]), "--admin-port", str(ports[2]))
    with Command("serve", str(MODEL), "--kv-cache-memory", "64MiB", "--device", "cpu", *flags) as command:
        command.wait_for(r"recurrent states: \d+ running requests")
        command.wait_for("Ctrl-C stops everything")
        yield Server(ports)


def test_concurrent_requests_get_the_text_of_transformers(server: Server) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    auto_class: Any = AutoModelForCausalLM
    model = auto_class.from_pretrained(MODEL, dtype=torch.float32).eval()
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    expected = [
        tokenizer.decode(greedy_tokens(model, prompt, NEW_TOKENS), skip_special_tokens=True) for prompt in prompts
    ]
    assert len(set(expected)) == len(TEXTS)
    with ThreadPoolExecutor(len(prompts)) as callers:
        assert list(callers.map(lambda prompt: server.complete(prompt, NEW_TOKENS), prompts)) == expected


def test_the_next_turn_of_a_conversation_starts_from_the_state_at_the_prompts_end(server: Server) -> None:
    messages = [
        {"role": "system", "content": STORIES},
        {"role": "user", "content": "What is the capital of Norway?"},
    ]
    answer, prompt_tokens, cached = server.ask(messages)
    assert cached == 0
    again, _, _ = server.ask(messages)
    assert again == answer
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Tell me a story."}]
    _, _, cached = server.ask(messages)
    assert cached >= (prompt_tokens - 1) // SPAN * SPAN
    assert server.metric("penstock:states_kept") > 0
    assert server.metric("penstock:state_slots_used") == 0


def test_the_status_shows_the_slots_of_states(server: Server) -> None:
    asked = [*PENSTOCK, "status", "--address", server.grpc, "--admin-address", server.admin]
    shown = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE, check=True)
    slots = int(server.metric("penstock:state_slots"))
    assert "state slots" in shown.stdout
    assert f"0 of {slots}" in shown.stdout
