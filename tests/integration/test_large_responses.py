"""A response that the frontend cannot send ends only its call, or only its request in a session."""

from pathlib import Path

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.config.sections import ServerConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, failure, make_request
from tests.fakes.patience import PATIENCE

LISTENER = ServerConfig(host="127.0.0.1", port=0, max_message_bytes=64 * 1024)
LARGE = make_request(token_ids={"ids": [7] * 2000}, prompt_logprobs=20, max_tokens=2, request_id="large")


async def test_a_response_that_is_too_large_ends_its_call_with_its_size(model: Path) -> None:
    async with (
        FakeEngine(vocab_size=256, max_model_len=4000) as engine,
        FrontendServer(model, engines=[engine.address], server=LISTENER) as frontend,
    ):
        error = await failure(frontend.stub.Generate(LARGE, timeout=PATIENCE))
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE")
        assert error.message.endswith("bytes; server.max_message_bytes is 65536")
        assert (await frontend.outputs("hi", max_tokens=3))[-1].usage.completion_tokens == 3


async def test_in_a_session_it_ends_its_request_alone(model: Path) -> None:
    async with (
        FakeEngine(vocab_size=256, max_model_len=4000) as engine,
        FrontendServer(model, engines=[engine.address], server=LISTENER) as frontend,
    ):
        small = make_request("hi", max_tokens=3, request_id="small")
        messages = [pb.GenerateSessionRequest(generate=each) for each in (LARGE, small)]
        answers = [answer async for answer in frontend.stub.GenerateSession(iter(messages), timeout=PATIENCE)]
    (error,) = [answer.error for answer in answers if answer.HasField("error")]
    assert (error.request_id, error.error.reason) == ("large", "MESSAGE_TOO_LARGE")
    assert sum(len(answer.output.token_ids) for answer in answers if answer.output.request_id == "small") == 3
