"""LangChain and LlamaIndex against the OpenAI API, set up as in docs/reference/openai-api.md.

Each framework has its own environment (``make framework-clients``), because its dependencies conflict with
constraints.txt.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import EOS, byte_level, ids_of
from tests.fakes.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "frameworks"
BUILD = ROOT / "build" / "frameworks"
TOKENIZER = byte_level()
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
PERSON = '{"name": "Ada", "age": 36}'


def answer_to(request: Any) -> list[int]:
    """Return the engine's output for the last turn of the prompt."""
    prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    last = prompt.rpartition("<|im_start|>user")[2]
    text = PERSON if "json, please" in last else CALL if "the weather?" in last else "Hello!"
    return ids_of(text + EOS)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[OpenAIServer]:
    model = save_chat_model(tmp_path / "chatml")
    async with FakeEngine(vocab_size=TOKENIZER.get_vocab_size(), max_model_len=4096) as engine:
        [engine.eos_token_id] = ids_of(EOS)
        engine.script = answer_to
        async with openai_server(model, engines=[engine.address]) as server:
            yield server


async def run(framework: str, api: OpenAIServer) -> dict[str, Any]:
    """Return the output of the framework's program. Skips the test if its environment is missing."""
    python = BUILD / framework / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {framework} (make framework-clients)")
    script = SCRIPTS / f"{framework.replace('-', '_')}_client.py"
    url = f"http://127.0.0.1:{api.port}/v1"
    process = await asyncio.create_subprocess_exec(
        str(python), str(script), url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 0, err.decode()
    printed: dict[str, Any] = json.loads(out)
    return printed


async def test_langchain(api: OpenAIServer) -> None:
    assert await run("langchain", api) == {
        "answer": "Hello!",
        "tokens": len(ids_of("Hello!" + EOS)),
        "streamed": "Hello!",
        "batch": ["Hello!", "Hello!"],
        "call": ["weather", {"city": "Köln"}],
        "after": "Hello!",
        "structured": {"name": "Ada", "age": 36},
        "extra": "Hello!",
    }


async def test_llama_index(api: OpenAIServer) -> None:
    assert await run("llama-index", api) == {
        "answer": "Hello!",
        "streamed": "Hello!",
        "call": ["weather", {"city": "Köln"}],
        "after": "Hello!",
        "completion": "Hello!",
        "extra": "Hello!",
    }
