"""Every list in a request has a maximum length. The error for a longer list has the field, the value and the limit."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from penstock.common.v1 import sampling_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_frontend.config import LimitsConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import collect, failure
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.patience import PATIENCE

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = LimitsConfig(
    max_prompt_length=200,
    max_prompts=3,
    max_prompt_parts=3,
    max_pooling_inputs=3,
    max_messages=3,
    max_content_parts=3,
    max_tools=3,
    max_tool_calls=3,
    max_stop_strings=3,
    max_stop_token_ids=3,
    max_logit_biases=3,
    max_allowed_token_ids=3,
    max_bad_words=3,
    max_bad_word_chars=3,
    max_structured_output_bytes=3,
    max_trace_context_bytes=30,
)
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
SAMPLING: dict[str, tuple[Any, str]] = {
    "stop": (["a", "b", "c", "d"], "stop has 4 strings; limits.max_stop_strings is 3"),
    "stop_token_ids": ([5, 6, 7, 8], "stop_token_ids has 4 ids; limits.max_stop_token_ids is 3"),
    "logit_bias": ({5: 1.0, 6: 1.0, 7: 1.0, 8: 1.0}, "logit_bias has 4 ids; limits.max_logit_biases is 3"),
    "allowed_token_ids": ([5, 6, 7, 8], "allowed_token_ids has 4 ids; limits.max_allowed_token_ids is 3"),
    "bad_words": (["a", "b", "c", "d"], "bad_words has 4 words; limits.max_bad_words is 3"),
}
CONVERSATION: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": [USER] * 4}, "messages has 4 entries; limits.max_messages is 3"),
    "tools": ({"messages": [USER], "tools": [TOOL] * 4}, "tools has 4 entries; limits.max_tools is 3"),
    "messages[1].tool_calls": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL] * 4}]},
        "messages[1].tool_calls has 4 entries; limits.max_tool_calls is 3",
    ),
    "messages[0].content": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4}]},
        "messages[0].content has 4 entries; limits.max_content_parts is 3",
    ),
}
HTTP: list[tuple[str, dict[str, Any], str, str]] = [
    *(("/v1/completions", {"prompt": "x", name: value}, name, text) for name, (value, text) in SAMPLING.items()),
    *(("/v1/chat/completions", body, field, text) for field, (body, text) in CONVERSATION.items()),
    *(("/tokenize", body, field, text) for field, (body, text) in CONVERSATION.items()),
    ("/v1/completions", {"prompt": ["x"] * 4}, "prompt", "prompt has 4 prompts; limits.max_prompts is 3"),
    ("/v1/completions", {"prompt": [5] * 201}, "prompt", "prompt has 201 ids; limits.max_prompt_length is 200"),
    (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"choice": ["a", "b", "c", "d"]}},
        "structured_outputs.choice",
        "structured_outputs.choice has 4 bytes; limits.max_structured_output_bytes is 3",
    ),
    ("/v1/embeddings", {"input": ["x"] * 4}, "input", "input has 4 entries; limits.max_pooling_inputs is 3"),
    ("/detokenize", {"tokens": [5] * 201}, "tokens", "tokens has 201 ids; limits.max_prompt_length is 200"),
]


def generate(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"text": "x"} | fields))


def chat(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(**({"messages": [pb.ChatMessage(role="user", content="hi")]} | fields))


def params(name: str, value: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**{name: value})


LISTS: list[tuple[str, Any, str]] = [
    *((name, value, text) for name, (value, text) in SAMPLING.items()),
    ("logprob_token_ids", [5] * 129, "logprob_token_ids has 129 ids; the limit is 128"),
    ("bad_word_token_ids", [{"token_ids": [5]}] * 4, "bad_word_token_ids has 4 sequences; limits.max_bad_words is 3"),
    (
        "bad_word_token_ids[0]",
        [{"token_ids": [5] * 4}],
        "bad_word_token_ids[0] has 4 ids; limits.max_bad_word_chars is 3",
    ),
    (
        "structured_output.choice",
        {"choice": {"options": ["a", "b", "c", "d"]}},
        "structured_output.choice has 4 bytes; limits.max_structured_output_bytes is 3",
    ),
]
PART, INPUT = pb.PromptPart(text="x"), pb.PoolingInput(text="x")
TRACE = {"trace_context": {"traceparent": "x" * 20}}
TOO_LONG = "routing.trace_context has 31 bytes; limits.max_trace_context_bytes is 30"
GRPC: list[tuple[str, Any, str, str]] = [
    *(
        (method, make(sampling_params=params(name.split("[")[0].split(".")[0], value)), f"sampling_params.{name}", text)
        for name, value, text in LISTS
        for method, make in (("Generate", generate), ("Chat", chat))
    ),
    (
        "Generate",
        pb.GenerateRequest(mixed=pb.MixedPrompt(parts=[PART] * 4)),
        "mixed.parts",
        "mixed.parts has 4 entries; limits.max_prompt_parts is 3",
    ),
    (
        "Generate",
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 201)),
        "token_ids.ids",
        "token_ids.ids has 201 ids; limits.max_prompt_length is 200",
    ),
    ("Generate", generate(routing=TRACE), "routing.trace_context", TOO_LONG),
    ("Embed", pb.EmbedRequest(inputs=[INPUT], routing=TRACE), "routing.trace_context", TOO_LONG),
    (
        "Chat",
        chat(messages=[pb.ChatMessage(role="user")] * 4),
        "messages",
        "messages has 4 entries; limits.max_messages is 3",
    ),
    ("Chat", chat(tools=[pb.Tool(name="f")] * 4), "tools", "tools has 4 entries; limits.max_tools is 3"),
    (
        "Chat",
        chat(messages=[pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f")] * 4)]),
        "messages[0].tool_calls",
        "messages[0].tool_calls has 4 entries; limits.max_tool_calls is 3",
    ),
    *(
        (method, kind(inputs=[INPUT] * 4), "inputs", "inputs has 4 entries; limits.max_pooling_inputs is 3")
        for method, kind in (("Embed", pb.EmbedRequest), ("Classify", pb.ClassifyRequest))
    ),
    (
        "Score",
        pb.ScoreRequest(query=INPUT, documents=[INPUT] * 4),
        "documents",
        "documents has 4 entries; limits.max_pooling_inputs is 3",
    ),
    (
        "Detokenize",
        pb.DetokenizeRequest(token_ids=[5] * 201),
        "token_ids",
        "token_ids has 201 ids; limits.max_prompt_length is 200",
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OpenAIServer]:
    model = save_chat_model(tmp_path_factory.mktemp("models") / "chatml")
    engine = FakeEngine(vocab_size=byte_level().get_vocab_size(), max_model_len=512)
    async with engine, openai_server(model, engines=[engine.address], limits=LIMITS) as api:
        yield api


@pytest.mark.parametrize(
    ("path", "body", "field", "message"), HTTP, ids=[f"{path} {field}" for path, _, field, _ in HTTP]
)
async def test_lists_over_http(api: OpenAIServer, path: str, body: dict[str, Any], field: str, message: str) -> None:
    response = await api.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["message"]) == (400, field, message)


@pytest.mark.parametrize(
    ("method", "request_", "field", "message"), GRPC, ids=[f"{method} {field}" for method, _, field, _ in GRPC]
)
async def test_lists_over_grpc(api: OpenAIServer, method: str, request_: Any, field: str, message: str) -> None:
    error = await failure(getattr(api.server.stub, method)(request_, timeout=PATIENCE))
    assert (error.code, error.field) == ("INVALID_ARGUMENT", field)
    assert error.message.removeprefix("sampling_params.") == message


async def test_every_repeated_field_of_a_request_is_in_the_table() -> None:
    """Fails for a new repeated field until the field has a bound and an entry in the table above."""
    # bad_word_token_ids contains token_ids.
    known = {field.rsplit(".", 1)[-1].split("[")[0] for _, _, field, _ in GRPC} | {"token_ids"}
    known |= {"ids", "options", "embeds", "shape"}  # the check of a tensor's bytes also checks its shape
    known |= {"frames", "tensors"}  # media.max_frames and the model's tensor names bound these
    known |= {"temperatures"}  # only models for speech take Transcribe: tests/unit/frontend/speech
    seen: set[str] = set()

    def walk(descriptor: Any) -> None:
        if descriptor.full_name in seen:
            return
        seen.add(descriptor.full_name)
        for field in descriptor.fields:
            if field.is_repeated:
                assert field.name in known, f"{field.full_name} is in no row"
            if field.message_type is not None and not field.message_type.GetOptions().map_entry:
                walk(field.message_type)

    for method in pb.DESCRIPTOR.message_types_by_name.values():
        if method.name.endswith("Request"):
            walk(method)


async def test_a_session_bounds_the_lists_of_its_requests(api: OpenAIServer) -> None:
    async def requests() -> AsyncIterator[pb.GenerateSessionRequest]:
        parts = pb.MixedPrompt(parts=[PART] * 4)
        yield pb.GenerateSessionRequest(generate=pb.GenerateRequest(request_id="r", mixed=parts))

    [message] = await collect(api.server.stub.GenerateSession(requests(), timeout=PATIENCE))
    assert message.error.error.message == "mixed.parts has 4 entries; limits.max_prompt_parts is 3"
