"""A checkpoint whose media encoders are unknown, as a user serves it: refused with the remedy, and then for its text."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from penstock_local.serving.machine_resources import free_ports
from tests.fakes.clients.command import Command
from tests.fakes.composite_text_models import save_composite
from tests.fakes.media_files import image_file

pytestmark = pytest.mark.slow
WHY = "accepts only text: the media encoders of cohere2_vision models are not supported"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "cohere2_vision"
    save_composite("cohere2_vision", folder)
    return folder


@pytest.fixture(scope="module")
def ports(model: Path) -> Iterator[list[int]]:
    ports = free_ports(3)
    flags = ("--grpc-port", str(ports[0]), "--http-port", str(ports[1]), "--admin-port", str(ports[2]))
    settings = ("--no-media", "--kv-cache-memory", "16MiB", "--device", "cpu")
    with Command("serve", str(model), *settings, *flags) as command:
        command.wait_for("Ctrl-C stops everything")
        yield ports


def test_the_command_refuses_it_with_the_remedy(model: Path) -> None:
    with Command("serve", str(model), "--device", "cpu") as command:
        assert command.wait_for_exit() == 2
        assert "Cohere2VisionForConditionalGeneration is not supported" in command.output
        assert "use --no-media (penstock serve)" in command.output


def test_its_text_is_served_and_images_are_refused_over_http(ports: list[int]) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{ports[1]}/v1", api_key="none", max_retries=0)

    def ask(*parts: Any) -> Any:
        return client.chat.completions.create(
            model="cohere2_vision", messages=[{"role": "user", "content": list(parts)}], max_tokens=3
        )

    text = {"type": "text", "text": "hello"}
    assert ask(text).usage.completion_tokens == 3
    url = f"data:image/png;base64,{base64.b64encode(image_file()).decode()}"
    with pytest.raises(BadRequestError, match=WHY):
        ask(text, {"type": "image_url", "image_url": {"url": url}})


def test_images_are_refused_over_grpc(ports: list[int], tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(image_file())
    with Command("generate", "hello", "--image", str(image), "--address", f"localhost:{ports[0]}") as command:
        assert command.wait_for_exit() == 1
        assert WHY in command.output
