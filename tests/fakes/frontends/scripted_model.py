"""A real frontend with a scripted model: only the engine's tokens are scripted; tokenizer, template and parsers are
real.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.enginecore.v1 import messages_pb2 as pb
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import EOS, byte_level

TOKENIZER = byte_level()
ASIDE = "A title"
"""The model's answer to requests without tools. Programs send such requests to get a title of a conversation."""


class ScriptedModel:
    """The frontend's address, and the prompts that reached the model.

    The model answers with the first turn before which its turns have as many tool calls as the prompt has tool results.
    """

    def __init__(self, server: OpenAIServer, engine: FakeEngine) -> None:
        self.http = server.http
        self.port = server.port
        self.prompts: list[str] = []
        """Prompts with tools, in order of arrival."""
        self.turns: Sequence[str] = ()
        engine.script = self._tokens

    def says(self, turns: Sequence[str]) -> None:
        """Answer with these turns from now on, and forget the prompts."""
        self.turns = turns
        self.prompts.clear()

    def _tokens(self, request: pb.EngineCoreRequest) -> list[int]:
        prompt = TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False)
        if "<tools>" not in prompt:
            return _ids(ASIDE + EOS)
        self.prompts.append(prompt)
        done = prompt.count("<tool_response>")
        called = 0
        for turn in self.turns:
            if called >= done:
                return _ids(turn + EOS)
            called += turn.count("<tool_call>")
        return _ids(self.turns[-1] + EOS)


@asynccontextmanager
async def scripted_model(folder: Path, **http: Any) -> AsyncIterator[ScriptedModel]:
    """Start a frontend with the model. ``folder``: directory for the model's files. ``http``: fields of HttpConfig."""
    model = save_chat_model(folder / "model")
    (model / "generation_config.json").write_text(json.dumps({"max_new_tokens": 4096}), encoding="utf-8")
    engine = FakeEngine(vocab_size=TOKENIZER.get_vocab_size(), max_model_len=1_000_000)
    engine.tokens_per_step = 8
    [engine.eos_token_id] = _ids(EOS)
    async with engine, openai_server(model, engines=[engine.address], http=http) as server:
        yield ScriptedModel(server, engine)


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids
