"""API keys and tokens at the frontend's ports: accepted credentials, errors for refused credentials, and the tenant
of a request.
"""

import base64
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import jwt
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.config.sections import LogConfig
from penstock_frontend.config import AuthConfig, HttpConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, failure, make_request
from tests.fakes.network.certificates import replace
from tests.fakes.network.issuer import Issuer, write_key_set

ALICE, GATEWAY, ONCALL = "sk-alice-0123456789", "sk-gateway-0123456789", "sk-oncall-0123456789"
KEYS = f"""
# comments and empty lines count for nothing
{ALICE} name=alice tenant=acme   # so does this
{GATEWAY} name=gateway tenant=*
{ONCALL} name=oncall scopes=inference,admin
"""


class Guarded:
    """A frontend that asks for credentials."""

    def __init__(self, server: FrontendServer, http: httpx.AsyncClient, issuer: Issuer, files: Path) -> None:
        self.server = server
        self.http = http
        self.issuer = issuer
        self.keys = files / "keys.txt"
        self.key_set = files / "jwks.json"


@pytest.fixture
async def guarded(engine: FakeEngine, model: Path, tmp_path: Path) -> AsyncIterator[Guarded]:
    issuer = Issuer()
    (tmp_path / "keys.txt").write_text(KEYS)
    auth = AuthConfig(
        api_keys=str(tmp_path / "keys.txt"),
        jwt=write_key_set(tmp_path / "jwks.json", issuer, Issuer("key-2")),
        admin=True,
        metrics=True,
    )
    http = HttpConfig(host="127.0.0.1", port=0)
    options: dict[str, Any] = {"auth": auth, "http": http, "log": LogConfig(requests=True)}
    async with FrontendServer(model, engines=[engine.address], **options) as server:
        await server.until_health(serving=True)  # the health service requires no credentials
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.frontend.http_port}", verify=False) as client:
            yield Guarded(server, client, issuer, tmp_path)


def bearer(credential: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {credential}"),)


def unsigned(issuer: Issuer) -> str:
    return jwt.encode(issuer.claims(), None, algorithm="none", headers={"kid": issuer.kid})


def signed_with_the_public_key(issuer: Issuer) -> str:
    """Return a token signed by HMAC with the public key. The token attacks verifiers that use the algorithm named in
    the token.
    """
    parts = [{"alg": "HS256", "kid": issuer.kid}, issuer.claims()]
    text = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    key = json.dumps(issuer.jwk).encode()
    signature = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(text.encode(), key)
    return f"{text}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def tampered(issuer: Issuer) -> str:
    head, _, signature = issuer.token().split(".")
    claims = base64.urlsafe_b64encode(json.dumps(issuer.claims(sub="mallory")).encode()).decode().rstrip("=")
    return f"{head}.{claims}.{signature}"


NOW = time.time()
BAD_TOKENS = {
    "expired": lambda issuer: issuer.token(exp=int(NOW) - 100),
    "not valid yet": lambda issuer: issuer.token(nbf=int(NOW) + 3600),
    "without an end": lambda issuer: issuer.token(exp=None),
    "of another issuer": lambda issuer: issuer.token(iss="https://other.test"),
    "without an issuer": lambda issuer: issuer.token(iss=None),
    "for another audience": lambda issuer: issuer.token(aud="somebody"),
    "without an audience": lambda issuer: issuer.token(aud=None),
    "signed by somebody else": lambda issuer: Issuer(issuer.kid).token(),
    "with a key that nobody knows": lambda issuer: Issuer("key-9").token(),
    "signed with another known key's name": lambda issuer: issuer.token(headers={"kid": "key-2"}),
    "without a key's name, where there are two": lambda issuer: issuer.token(headers={"kid": None}),
    "unsigned": unsigned,
    "signed with the public key as a secret": signed_with_the_public_key,
    "tampered with": tampered,
    "with a tenant that is no text": lambda issuer: issuer.token(tenant=["acme"]),
    "no token at all": lambda issuer: "a.b.c",
    "huge": lambda issuer: issuer.token(more="x" * 20_000),
}


async def test_bad_tokens_are_refused_over_grpc_and_http_and_not_repeated(guarded: Guarded) -> None:
    seen = {}
    for case, make in BAD_TOKENS.items():
        token = make(guarded.issuer)
        error = await failure(guarded.server.stub.Generate(make_request(), metadata=bearer(token)))
        answer = await guarded.http.get("/v1/models", headers={"authorization": f"Bearer {token}"})
        seen[case] = (error.code, error.reason, answer.status_code, answer.headers.get("www-authenticate"))
        for part in token.split("."):
            assert len(part) < 4 or part not in error.message + answer.text, case
    refused = ("UNAUTHENTICATED", "CREDENTIALS_WRONG", 401, 'Bearer realm="penstock"')
    expired = ("UNAUTHENTICATED", "TOKEN_EXPIRED", 401, 'Bearer realm="penstock"')
    assert seen == dict.fromkeys(BAD_TOKENS, refused) | {"expired": expired}


BAD_KEYS: list[tuple[dict[str, str], str]] = [
    ({}, "CREDENTIALS_MISSING"),
    ({"authorization": "Bearer"}, "CREDENTIALS_MISSING"),
    ({"authorization": "Bearer sk-nobody-0123456789"}, "CREDENTIALS_WRONG"),
    ({"authorization": f"Basic {ALICE}"}, "CREDENTIALS_WRONG"),
    ({"authorization": f"Bearer {ALICE[:-1]}"}, "CREDENTIALS_WRONG"),
    ({"authorization": f"Bearer {ALICE}x"}, "CREDENTIALS_WRONG"),
    ({"x-api-key": "sk-nobody-0123456789"}, "CREDENTIALS_WRONG"),
    ({"authorization": "Bearer wrong-0123456789", "x-api-key": "sk-nobody-0123456789"}, "CREDENTIALS_WRONG"),
    ({"authorization": "Bearer", "x-api-key": "sk-nobody-0123456789"}, "CREDENTIALS_MISSING"),
]


async def test_missing_and_wrong_keys_are_refused_over_grpc_and_http(guarded: Guarded) -> None:
    for headers, reason in BAD_KEYS:
        error = await failure(guarded.server.stub.Generate(make_request(), metadata=tuple(headers.items())))
        answer = await guarded.http.post("/v1/completions", headers=headers, json={"prompt": "hi"})
        assert (error.code, error.reason) == ("UNAUTHENTICATED", reason), headers
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == 'Bearer realm="penstock"'
        assert answer.headers["x-request-id"]


async def test_an_anthropic_client_is_refused_in_its_protocols_form(guarded: Guarded) -> None:
    answer = await guarded.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


async def test_a_key_opens_grpc_and_http_and_the_schemes_case_does_not_matter(guarded: Guarded) -> None:
    for name, value in (("authorization", f"bEaReR {ALICE}"), ("x-api-key", ALICE)):
        request = make_request(max_tokens=4)
        responses = [r async for r in guarded.server.stub.Generate(request, metadata=((name, value),))]
        body = {"prompt": "hi", "max_tokens": 4}
        answer = await guarded.http.post("/v1/completions", headers={name: value}, json=body)
        assert sum(len(r.token_ids) for r in responses) == 4
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("authorization", "key"),
    [
        ("Bearer sk-stale-0123456789", ALICE),
        ("Basic dXNlcjpwYXNz", ALICE),
        ("Bearer", ALICE),
        ("Bearer a.b.c", ALICE),
        (f"Bearer {ALICE}", "sk-stale-0123456789"),
        (f"Bearer {ALICE}", ONCALL),
    ],
)
async def test_a_stale_credential_beside_a_valid_one_is_passed_over(
    guarded: Guarded, authorization: str, key: str
) -> None:
    headers = {"authorization": authorization, "x-api-key": key}
    await guarded.server.stub.ListModels(pb.ListModelsRequest(), metadata=tuple(headers.items()))
    for route in ("/v1/models", "/v1/responses/x", "/v1/nothing"):
        assert (await guarded.http.get(route, headers=headers)).status_code != 401
    for route in ("/v1/completions", "/v1/messages", "/v1/embeddings"):
        assert (await guarded.http.post(route, headers=headers, json={})).status_code == 400
    # Of two valid credentials, the frontend uses the first one. ONCALL's scope differs from ALICE's scope.
    vllm = vllm_engine_pb2_grpc.VllmEngineStub(guarded.server.channel)
    abort = vllm.Abort(vllm_engine_pb2.AbortRequest(), metadata=tuple(headers.items()))
    assert (await failure(abort)).code == "PERMISSION_DENIED"


async def test_a_token_opens_grpc_and_http(guarded: Guarded) -> None:
    token = guarded.issuer.token()
    await guarded.server.stub.ListModels(pb.ListModelsRequest(), metadata=bearer(token))
    answer = await guarded.http.get("/v1/models", headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == 200


async def test_every_method_of_the_public_port_asks_and_the_refusal_has_googles_details(guarded: Guarded) -> None:
    vllm = vllm_engine_pb2_grpc.VllmEngineStub(guarded.server.channel)
    session = guarded.server.stub.GenerateSession()
    calls = [
        guarded.server.stub.Generate(make_request()),
        guarded.server.stub.ListModels(pb.ListModelsRequest()),
        guarded.server.stub.Tokenize(pb.TokenizeRequest(text="x")),
        vllm.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest()),
        vllm.Generate(vllm_engine_pb2.GenerateRequest(request_id="r")),
    ]
    assert [(await failure(call)).code for call in calls] == ["UNAUTHENTICATED"] * len(calls)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await session.read()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    details = status_pb2.Status.FromString(dict(refused.value.trailing_metadata())["grpc-status-details-bin"]).details
    info = error_details_pb2.ErrorInfo()
    assert details[0].Unpack(info)
    assert (info.reason, info.domain) == ("CREDENTIALS_MISSING", "penstock")


async def test_health_is_open_and_reflection_asks(guarded: Guarded) -> None:
    health: Any = health_pb2_grpc.HealthStub(guarded.server.channel)
    status = await health.Check(health_pb2.HealthCheckRequest())
    assert status.status == health_pb2.HealthCheckResponse.SERVING
    assert (await guarded.http.get("/health")).status_code == 200
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(guarded.server.channel)
    ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await reflection.ServerReflectionInfo().read()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    answers = [a async for a in reflection.ServerReflectionInfo(iter(ask), metadata=bearer(ALICE))]
    assert answers[0].list_services_response.service


async def test_operator_rpcs_require_the_scope_admin(guarded: Guarded) -> None:
    ask = admin_pb.GetClusterRequest()
    vllm = vllm_engine_pb2_grpc.VllmEngineStub(guarded.server.channel)
    assert (await failure(guarded.server.admin.GetCluster(ask))).code == "UNAUTHENTICATED"
    denied = await failure(guarded.server.admin.GetCluster(ask, metadata=bearer(ALICE)))
    assert (denied.code, denied.reason) == ("PERMISSION_DENIED", "SCOPE_MISSING")
    assert "alice" in denied.message
    others = vllm_engine_pb2.AbortRequest(request_ids=["somebody-elses"])
    assert (await failure(vllm.Abort(others, metadata=bearer(ALICE)))).code == "PERMISSION_DENIED"
    await guarded.server.admin.GetCluster(ask, metadata=bearer(ONCALL))
    token = guarded.issuer.token(scope="openid penstock-admin")
    await guarded.server.admin.GetCluster(ask, metadata=bearer(token))
    await vllm.Abort(others, metadata=bearer(ONCALL))


async def test_metrics_and_the_clusters_state_ask_and_the_page_itself_does_not(guarded: Guarded) -> None:
    statuses = {path: (await guarded.http.get(path)).status_code for path in ("/metrics", "/cluster", "/", "/nowhere")}
    assert statuses == {"/metrics": 401, "/cluster": 401, "/": 200, "/nowhere": 401}
    headers = {"x-api-key": ALICE}
    assert (await guarded.http.get("/metrics", headers=headers)).status_code == 200
    assert (await guarded.http.get("/cluster", headers=headers)).status_code == 200


TENANTS = [
    (ALICE, "globex", "acme"),
    (ALICE, "", "acme"),
    (ONCALL, "acme", ""),
    (GATEWAY, "acme", "acme"),
    ("a token", "acme", "globex"),
]


async def test_requests_are_the_callers_tenants_whatever_they_claim(guarded: Guarded, engine: FakeEngine) -> None:
    for credential, claimed, tenant in TENANTS:
        engine.requests.clear()
        token = guarded.issuer.token() if credential == "a token" else credential
        await _request_everywhere(guarded, token, claimed)
        assert [request.tenant for request in engine.requests] == [tenant] * 5


async def _request_everywhere(guarded: Guarded, credential: str, claimed: str) -> None:
    """Send a request over every protocol. Each request claims to belong to a tenant."""
    metadata = bearer(credential)
    request = make_request(max_tokens=2)
    request.routing.tenant = claimed
    async for _ in guarded.server.stub.Generate(request, metadata=metadata):
        pass
    async for _ in guarded.server.stub.Generate(
        make_request(max_tokens=2), metadata=(*metadata, ("x-penstock-tenant", claimed))
    ):
        pass
    headers = {"authorization": metadata[0][1], "x-penstock-tenant": claimed}
    await guarded.http.post("/v1/completions", headers=headers, json={"prompt": "hi", "max_tokens": 2})
    vllm = vllm_engine_pb2_grpc.VllmEngineStub(guarded.server.channel)
    facade = vllm_engine_pb2.GenerateRequest(request_id="r", tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[5]))
    facade.sampling_params.max_tokens = 2
    async for _ in vllm.Generate(facade, metadata=(*metadata, ("x-penstock-tenant", claimed))):
        pass
    session = guarded.server.stub.GenerateSession(metadata=metadata)
    message = pb.GenerateSessionRequest()
    message.generate.CopyFrom(request)
    message.generate.request_id = "one"
    await session.write(message)
    await session.done_writing()
    async for _ in session:
        pass


async def test_keys_are_reloaded_and_a_broken_file_keeps_the_old_ones(
    guarded: Guarded, capfd: pytest.CaptureFixture[str]
) -> None:
    async def status(key: str) -> int:
        return (await guarded.http.get("/v1/models", headers={"x-api-key": key})).status_code

    new = "sk-brand-new-0123456789"
    replace(guarded.keys, f"{new}\n".encode())
    assert [await status(key) for key in (new, ALICE)] == [200, 401]
    replace(guarded.keys, f"{new} nonsense\nsk-short\n".encode())
    assert [await status(key) for key in (new, ALICE)] == [200, 401]
    guarded.keys.unlink()
    assert await status(new) == 200
    replace(guarded.keys, KEYS.encode())
    assert [await status(key) for key in (new, ALICE)] == [401, 200]
    log = capfd.readouterr()
    assert "line 1" in log.out + log.err
    assert new not in log.out + log.err


async def test_key_sets_are_read_anew(guarded: Guarded) -> None:
    new = Issuer("key-3")
    assert (await guarded.http.get("/v1/models", headers={"authorization": f"Bearer {new.token()}"})).status_code == 401
    write_key_set(guarded.key_set, new)
    assert (await guarded.http.get("/v1/models", headers={"authorization": f"Bearer {new.token()}"})).status_code == 200
    old = guarded.issuer.token()
    assert (await guarded.http.get("/v1/models", headers={"authorization": f"Bearer {old}"})).status_code == 401
