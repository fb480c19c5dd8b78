"""Images sent by the command line and by OpenAI's client, to real services with the multimodal demo model."""

import base64
import io
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai import BadRequestError, OpenAI, PermissionDeniedError
from PIL import Image

from penstock_local.serving.machine_resources import free_ports
from tests.fakes.clients.command import Command
from tests.fakes.example_modules import example_modules

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model"
SCENES = 200
SEED = 20261127

pytestmark = pytest.mark.slow


class Server:
    """A server with the multimodal demo model."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.openai = OpenAI(base_url=f"http://127.0.0.1:{ports[1]}/v1", api_key="none", max_retries=0)

    def answer(self, content: list[dict[str, Any]] | str, **fields: Any) -> str:
        """Return the model's answer to a message."""
        said = self.openai.chat.completions.create(
            model="penstock-tiny-vision",
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
            temperature=0,
            max_tokens=120,
            **fields,
        )
        return said.choices[0].message.content or ""


def shown(image: Image.Image, question: str, kind: str = "PNG") -> list[dict[str, Any]]:
    """Return the content of a message with an image and a question."""
    file = io.BytesIO()
    image.save(file, kind)
    url = f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]


@pytest.fixture(scope="module")
def demo() -> Iterator[SimpleNamespace]:
    with example_modules(DEMO, ["pictures"]) as modules:
        yield modules


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    ports = free_ports(3)
    flags = ("--grpc-port", str(ports[0]), "--http-port", str(ports[1]), "--admin-port", str(ports[2]))
    settings = ("--kv-cache-memory", "64MiB", "--device", "cpu", "--engines", "2")
    with Command("serve", str(DEMO / "penstock-tiny-vision"), *settings, *flags) as command:
        command.wait_for("Ctrl-C stops everything")
        yield Server(ports)


def test_most_scenes_that_it_has_never_seen_are_answered_right(demo: SimpleNamespace, server: Server) -> None:
    rng = random.Random(SEED)
    asked = []
    for _ in range(SCENES):
        scene = demo.pictures.make_scene(rng)
        asked.append((scene.draw(rng.choice((96, 128, 256, 300))), *demo.pictures.ask(scene, rng)))

    def right(case: tuple[Image.Image, str, str]) -> bool:
        image, question, wanted = case
        return server.answer(shown(image, question)).strip() == wanted

    with ThreadPoolExecutor(8) as callers:
        assert sum(callers.map(right, asked)) >= 0.95 * SCENES


def test_what_no_image_is_names_its_place_and_the_next_request_is_served(demo: SimpleNamespace, server: Server) -> None:
    broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,bm8gaW1hZ2U="}}]
    with pytest.raises(BadRequestError) as caught:
        server.answer([*broken, {"type": "text", "text": "How many shapes are there?"}])
    assert "messages[0].content[0]" in str(caught.value)
    scene = demo.pictures.make_scene(random.Random(1))
    assert server.answer(shown(scene.draw(96), "How many shapes are there?"))


def test_a_file_of_this_machine_is_not_read(server: Server) -> None:
    with pytest.raises(PermissionDeniedError):
        server.answer([{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}])
