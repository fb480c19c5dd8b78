"""Chat over gRPC: a real frontend, and a fake engine whose output text the test sets."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.common.v1 import finish_pb2, sampling_pb2, structured_output_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import ConfigError, InvalidArgument, NotFound, Unimplemented
from penstock_frontend.config import ModelConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, collect, eventually, failure
from tests.fakes.models.chat_templates import LLAMA, save_chat_model
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.patience import PATIENCE

TOKENIZER = byte_level()
HI = pb.ChatMessage(role="user", content="hi")
WEATHER = pb.Tool(name="weather", parameters='{"type": "object", "properties": {"city": {"type": "string"}}}')
CALL = 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🙂"}}\n</tool_call>'
CALL += '\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
KINDS = [sampling_pb2.OUTPUT_KIND_DELTA, sampling_pb2.OUTPUT_KIND_CUMULATIVE, sampling_pb2.OUTPUT_KIND_FINAL]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture
async def writer() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(vocab_size=TOKENIZER.get_vocab_size(), max_model_len=2048) as engine:
        yield engine


@pytest.fixture
async def chat(writer: FakeEngine, chatml: Path) -> AsyncIterator[FrontendServer]:
    async with FrontendServer(chatml, engines=[writer.address]) as frontend:
        await frontend.until_health(serving=True)
        yield frontend


def says(engine: FakeEngine, text: str) -> None:
    engine.script = lambda request: ids(text)


def request(*messages: pb.ChatMessage, **fields: Any) -> pb.ChatRequest:
    """Return a ChatRequest. Keywords that are not fields of ChatRequest are sampling parameters."""
    own = {name: fields.pop(name) for name in list(fields) if name in pb.ChatRequest.DESCRIPTOR.fields_by_name}
    message = pb.ChatRequest(messages=messages or [HI], **own)
    message.sampling_params.MergeFrom(sampling_pb2.SamplingParams(**({"max_tokens": 1000} | fields)))
    return message


async def answers(frontend: FrontendServer, *messages: pb.ChatMessage, **fields: Any) -> list[pb.ChatResponse]:
    got: list[pb.ChatResponse] = await collect(frontend.stub.Chat(request(*messages, **fields), timeout=PATIENCE))
    return got


def calls(responses: Sequence[pb.ChatResponse]) -> list[tuple[str, str]]:
    """Return the name and the arguments of each tool call. Pieces with the same id are joined."""
    found: dict[str, list[str]] = {}
    for call in (call for response in responses for call in response.tool_calls):
        if call.id not in found:
            found[call.id] = [call.name, ""]
        found[call.id][1] += call.arguments
    return [(name, arguments) for name, arguments in found.values()]


async def test_the_prompt_is_the_rendered_conversation_without_another_begin_of_sequence(
    chat: FrontendServer, writer: FakeEngine
) -> None:
    says(writer, "Hello!")
    got = await answers(chat, request_id="r", temperature=0.5)
    assert "".join(response.content for response in got) == "Hello!"
    (sent,) = writer.requests
    assert TOKENIZER.decode(sent.prompt_token_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert sent.sampling_params.temperature == 0.5
    assert {response.request_id for response in got} == {"r"}
    assert got[-1].finish_reason == finish_pb2.FINISH_REASON_LENGTH
    assert got[-1].usage.completion_tokens == len(ids("Hello!"))


async def test_reasoning_content_and_calls_are_told_apart(chat: FrontendServer, writer: FakeEngine) -> None:
    says(writer, f"<think>\nWhere?\n</think>\n\n{CALL}")
    got = await answers(chat, tools=[WEATHER])
    assert "".join(response.reasoning for response in got) == "Where?"
    assert "".join(response.content for response in got) == "Let me look."
    assert calls(got) == [("weather", '{"city": "Köln 🙂"}'), ("weather", "{}")]
    assert [i for response in got for i in response.token_ids] == ids(f"<think>\nWhere?\n</think>\n\n{CALL}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream_interval", [1, 7])
async def test_every_output_kind_says_the_same_in_the_end(
    chat: FrontendServer, writer: FakeEngine, kind: sampling_pb2.OutputKind.ValueType, stream_interval: int
) -> None:
    says(writer, f"<think>hm</think>{CALL}")
    got = await answers(chat, tools=[WEATHER], output_kind=kind, stream_interval=stream_interval)
    last = got if kind == sampling_pb2.OUTPUT_KIND_DELTA else got[-1:]
    assert "".join(response.content for response in last) == "Let me look."
    assert "".join(response.reasoning for response in last) == "hm"
    assert calls(last) == [("weather", '{"city": "Köln 🙂"}'), ("weather", "{}")]


async def test_without_tools_there_are_no_calls(chat: FrontendServer, writer: FakeEngine) -> None:
    says(writer, CALL)
    got = await answers(chat)
    assert "".join(response.content for response in got) == CALL
    assert calls(got) == []


async def test_n_answers_are_read_each_on_its_own(chat: FrontendServer, writer: FakeEngine) -> None:
    writer.script = lambda request: ids(CALL if request.request_id.endswith(".0") else "<think>no</think>No.")
    got = await answers(chat, tools=[WEATHER], n=2)
    first, second = ([response for response in got if response.index == index] for index in range(2))
    assert calls(first) == [("weather", '{"city": "Köln 🙂"}'), ("weather", "{}")]
    assert ("".join(r.reasoning for r in second), "".join(r.content for r in second)) == ("no", "No.")


async def test_a_stop_string_ends_an_answer_before_it_is_read(chat: FrontendServer, writer: FakeEngine) -> None:
    says(writer, "<think>hm</think>yes, no")
    got = await answers(chat, stop=[", "])
    assert "".join(response.content for response in got) == "yes"
    assert got[-1].stop_reason.text == ", "


async def test_logprobs_go_with_the_tokens(chat: FrontendServer, writer: FakeEngine) -> None:
    says(writer, CALL)
    for response in await answers(chat, tools=[WEATHER], logprobs=1):
        assert len(response.logprobs.offsets) == (len(response.token_ids) + 1 if response.token_ids else 0)


async def test_a_continued_message_is_the_prompts_end(chat: FrontendServer, writer: FakeEngine) -> None:
    says(writer, " is")
    last = pb.ChatMessage(role="assistant", content="It")
    got = await answers(chat, HI, last, continue_final_message=True)
    assert TOKENIZER.decode(writer.requests[0].prompt_token_ids).endswith("<|im_start|>assistant\nIt")
    assert "".join(response.content for response in got) == " is"


async def test_template_variables_reach_the_template(chat: FrontendServer, writer: FakeEngine) -> None:
    says(writer, "<think>")
    got = await answers(chat, chat_template_kwargs='{"enable_thinking": false}')
    assert "".join(response.content for response in got) == "<think>"


async def test_metadata_hints_reach_the_engine(chat: FrontendServer, writer: FakeEngine) -> None:
    says(writer, "x")
    metadata = (("x-penstock-priority", "3"), ("x-penstock-tenant", "t"), ("traceparent", "00-1-2-01"))
    await collect(chat.stub.Chat(request(), metadata=metadata))
    assert writer.requests[0].priority == 3
    assert (writer.requests[0].tenant, writer.requests[0].HasField("tenant_weight")) == ("t", False)
    assert dict(writer.requests[0].trace_context) == {"traceparent": "00-1-2-01"}


async def test_the_tenant_is_in_the_log(chat: FrontendServer, writer: FakeEngine) -> None:
    says(writer, "x")
    with structlog.testing.capture_logs() as logs:
        await answers(chat, request_id="r", routing=pb.RoutingHints(tenant="t"))
        await collect(chat.generate(request_id="s", routing=pb.RoutingHints(tenant="u")))
    assert [(log["request"], log["tenant"]) for log in logs if log["event"] == "accepted a request"] == [
        ("r", "t"),
        ("s", "u"),
    ]


REQUIRED, NONE, AUTO = (pb.ToolChoice(mode=mode) for mode in ("required", "none", "auto"))
NAMED = pb.ToolChoice(function="weather")


@pytest.mark.parametrize("choice", [REQUIRED, NAMED], ids=["required", "named"])
async def test_a_tool_that_must_be_called_is_a_constraint(
    chat: FrontendServer, writer: FakeEngine, choice: pb.ToolChoice
) -> None:
    says(writer, '<tool_call>{"name": "weather"}</tool_call>')
    assert calls(await answers(chat, tools=[WEATHER], tool_choice=choice)) == [("weather", "{}")]
    assert '"name": "weather"' in TOKENIZER.decode(writer.requests[0].prompt_token_ids)
    constraint = json.loads(writer.requests[0].sampling_params.structured_output.structural_tag)
    assert '\\"name\\": \\"weather\\"' in json.dumps(constraint)


async def test_tools_that_must_not_be_called_are_not_shown(chat: FrontendServer, writer: FakeEngine) -> None:
    says(writer, CALL)
    got = await answers(chat, tools=[WEATHER], tool_choice=NONE)
    assert (calls(got), "".join(response.content for response in got)) == ([], CALL)
    assert "weather" not in TOKENIZER.decode(writer.requests[0].prompt_token_ids)


async def test_tools_that_may_be_called_are_no_constraint(chat: FrontendServer, writer: FakeEngine) -> None:
    says(writer, CALL)
    assert len(calls(await answers(chat, tools=[WEATHER], tool_choice=AUTO))) == 2
    assert not writer.requests[0].sampling_params.HasField("structured_output")


async def test_a_tool_that_must_be_called_goes_with_no_other_constraint(chat: FrontendServer) -> None:
    constraint = structured_output_pb2.StructuredOutput(regex="a")
    error = await failure(chat.stub.Chat(request(tools=[WEATHER], tool_choice=REQUIRED, structured_output=constraint)))
    assert isinstance(error, InvalidArgument)
    assert error.field == "sampling_params.structured_output"


async def test_tools_that_the_template_cannot_show_are_refused(writer: FakeEngine, tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path, "{{ messages[0].content }}")
    async with FrontendServer(folder, engines=[writer.address]) as frontend:
        error = await failure(frontend.stub.Chat(request(tools=[WEATHER])))
        assert isinstance(error, InvalidArgument)
        assert error.field == "tools"
        assert "--set frontend.model.tool_parser=..., which is one of: deepseek_v3, " in error.message
        says(writer, "x")
        await answers(frontend, tools=[WEATHER], tool_choice=NONE)


async def test_a_cancelled_chat_ends_in_the_engine(chatml: Path) -> None:
    async with (
        FakeEngine(vocab_size=TOKENIZER.get_vocab_size(), max_model_len=2048, manual=True) as engine,
        FrontendServer(chatml, engines=[engine.address]) as frontend,
    ):
        call = frontend.stub.Chat(request())
        await engine.until(lambda e: e.running)
        call.cancel()
        await engine.until(lambda e: e.aborted)


async def test_llamas_calls_are_read_by_its_parser(writer: FakeEngine, tmp_path: Path) -> None:
    says(writer, '{"name": "weather", "parameters": {"city": "Bonn"}}')
    async with FrontendServer(save_chat_model(tmp_path, LLAMA), engines=[writer.address]) as frontend:
        assert calls(await answers(frontend, tools=[WEATHER])) == [("weather", '{"city": "Bonn"}')]


async def test_a_parser_can_be_switched_off(writer: FakeEngine, chatml: Path) -> None:
    says(writer, f"<think>hm</think>{CALL}")
    model = ModelConfig(path=str(chatml), served_model_name="model", tool_parser="none", reasoning_parser="none")
    async with FrontendServer(chatml, engines=[writer.address], model=model) as frontend:
        got = await answers(frontend, tools=[WEATHER])
    assert "".join(response.content for response in got) == f"<think>hm</think>{CALL}"


async def test_tags_that_are_special_tokens_are_not_left_out(writer: FakeEngine, tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path)
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode('<tool_call>{"name": "f"}</tool_call>', add_special_tokens=False).ids
    writer.script = lambda request: tokens
    writer.ready.vocab_size = tokenizer.get_vocab_size()
    async with FrontendServer(folder, engines=[writer.address]) as frontend:
        assert calls(await answers(frontend, tools=[WEATHER])) == [("f", "{}")]


async def test_an_unknown_parser_ends_the_start(chatml: Path) -> None:
    with pytest.raises(ConfigError, match="model.tool_parser is 'x'"):
        async with FrontendServer(chatml, engines=["x:1"], model=ModelConfig(path=str(chatml), tool_parser="x")):
            pass


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ChatRequest(), "messages"),
        (request(HI, pb.ChatMessage()), "messages[1].role"),
        (request(pb.ChatMessage(role="user", content="x" * 20_000)), "prompt"),
        (request(tools=[WEATHER, pb.Tool(name="f", parameters="{")]), "tools[1].parameters"),
        (request(tools=[pb.Tool()]), "tools[0].name"),
        (request(tools=[WEATHER], tool_choice=pb.ToolChoice(mode="any")), "tool_choice"),
        (request(tools=[WEATHER], tool_choice=pb.ToolChoice(function="other")), "tool_choice"),
        (request(tools=[WEATHER], tool_choice=pb.ToolChoice(function="")), "tool_choice.function"),
        (request(tools=[WEATHER], tool_choice=pb.ToolChoice()), "tool_choice"),
        (request(tool_choice=REQUIRED), "tool_choice"),
        (request(chat_template_kwargs="[]"), "chat_template_kwargs"),
        (request(chat_template_kwargs='{"tools": 1}'), "chat_template_kwargs.tools"),
        (request(top_p=2), "sampling_params.top_p"),
        (request(output_kind=9), "sampling_params.output_kind"),
        (request(routing=pb.RoutingHints(tenant="t" * 257)), "routing.tenant"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_wrong_field_is_named(chat: FrontendServer, message: pb.ChatRequest, field: str) -> None:
    error = await failure(chat.stub.Chat(message))
    assert isinstance(error, InvalidArgument)
    assert error.field == field


async def test_other_models_and_adapters_are_refused(chat: FrontendServer) -> None:
    assert isinstance(await failure(chat.stub.Chat(request(model="other"))), NotFound)
    assert isinstance(await failure(chat.stub.Chat(request(lora="a"))), Unimplemented)


async def test_a_model_without_a_template_says_so(frontend: FrontendServer) -> None:
    error = await failure(frontend.stub.Chat(request()))
    assert isinstance(error, InvalidArgument)
    assert "the model has no chat template" in error.message


async def test_a_refused_chat_leaves_nothing_behind(chat: FrontendServer, writer: FakeEngine) -> None:
    says(writer, "x")
    await failure(chat.stub.Chat(request(pb.ChatMessage(role="root"), request_id="r")))
    await eventually(lambda: not chat.frontend._models[0].assembly.llm.num_live)
    assert json.dumps([r.content for r in await answers(chat, request_id="r")]) == '["x"]'
