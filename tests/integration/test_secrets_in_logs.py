"""Secrets never appear in logs, even at level debug: credentials, prompts and answers in any field of a request."""

from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from penstock.common.v1 import sampling_pb2, structured_output_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.models.small_tokenizers import byte_level, save_model
from tests.fakes.network.issuer import AUDIENCE, ISSUER, Issuer, write_key_set
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import KEPT, Service

KEY = "sk-Tausendschoen-0123456789"
WRONG = "sk-Vergissmeinnicht-0123456789"
WORD = "Geheimnis"
"""Word that every test value written by a user contains."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


async def over_grpc(address: str, credentials: list[tuple[str, str]]) -> None:
    """Send valid and invalid requests; only their log lines matter."""
    params = sampling_pb2.SamplingParams(max_tokens=4, stop=[WORD], seed=1)
    wrong = sampling_pb2.SamplingParams(top_p=7, bad_words=[WORD])
    grammar = sampling_pb2.SamplingParams(structured_output=structured_output_pb2.StructuredOutput(grammar=WORD))
    requests = [
        pb.GenerateRequest(text=f"{WORD}-prompt", sampling_params=params),
        pb.GenerateRequest(text=f"{WORD}-prompt", sampling_params=wrong),
        pb.GenerateRequest(text=f"{WORD}-prompt", sampling_params=grammar),
        pb.GenerateRequest(text=f"{WORD}-prompt" * 1000),
        pb.GenerateRequest(text="x", model=f"{WORD}-model", cache_salt=WORD),
    ]
    async with make_channel(address) as channel:
        stub = rpc.InferenceServiceStub(channel)
        for credential in credentials:
            metadata = (credential, ("x-more", WORD))
            for request in requests:
                await _ended(stub.Generate(request, metadata=metadata))
            await _ended(stub.Embed(pb.EmbedRequest(), metadata=metadata))


async def _ended(call: Any) -> None:
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError:
        return  # only the client gets the message


async def over_http(port: int, credentials: list[tuple[str, str]]) -> None:
    """Send the same requests over HTTP, and also malformed bodies."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": f"{WORD} prompt", "max_tokens": 4, "user": WORD, "stop": [WORD]}),
        ("/v1/completions", {"prompt": f"{WORD} prompt", "temperature": WORD}),
        ("/v1/completions", {"prompt": f"{WORD} prompt", "max_tokens": 4, "guided_regex": f"({WORD}"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORD}], "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": WORD, "content": WORD}], "tools": [{"type": WORD}]}),
        ("/v1/embeddings", {"input": WORD}),
        ("/tokenize", {"prompt": WORD}),
        (f"/{WORD}", {}),
    ]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=PATIENCE) as client:
        for name, value in credentials:
            headers = {name: value, "cookie": f"session={WORD}", "x-more": WORD}
            for path, body in bodies:
                await client.post(f"{path}?api_key={KEY}", headers=headers, json={"model": "model"} | body)
            await client.post("/v1/completions", headers=headers, content=f'{{"prompt": "{WORD}'.encode())
            await client.post("/v1/completions", headers=headers, content=f"\xff{WORD}".encode("latin-1"))


@pytest.mark.parametrize("form", ["text", "json"])
async def test_neither_credentials_nor_what_users_write_is_logged(form: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    issuer = Issuer()
    write_key_set(tmp_path / "jwks.json", issuer)
    (tmp_path / "keys").write_text(f"{KEY} name=alice tenant=acme\n")
    good, bad = issuer.token(), Issuer().token()
    credentials = [
        ("authorization", f"Bearer {KEY}"),
        ("x-api-key", KEY),
        ("authorization", f"Bearer {good}"),
        ("authorization", f"Bearer {WRONG}"),
        ("authorization", f"Basic {WRONG}"),
        ("authorization", f"Bearer {bad}"),
    ]
    http_port = free_port()
    async with FakeEngine(vocab_size=byte_level().get_vocab_size()) as engine:
        frontend = Service(
            "penstock_frontend",
            model__path=model,
            model__served_model_name="model",
            engines=f"[{engine.address}]",
            admin__port=0,
            http__host="127.0.0.1",
            http__port=http_port,
            auth__api_keys=tmp_path / "keys",
            auth__jwt__jwks=tmp_path / "jwks.json",
            auth__jwt__issuer=ISSUER,
            auth__jwt__audience=AUDIENCE,
            log__requests="true",
            log__format=form,
            **KEPT,
        )
        frontend.add_flag("log.level", "debug")
        async with frontend:
            await frontend.serving()
            await over_grpc(frontend.address, credentials)
            await over_http(http_port, credentials)
            await frontend.stop()
            log = frontend.log()
    assert "request finished" in log  # requests are logged
    assert "request failed" in log
    secrets = [KEY, WRONG, WORD, *good.split(".")[1:], *bad.split(".")[1:]]
    assert [secret for secret in secrets if secret in log] == []
