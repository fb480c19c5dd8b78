"""Program that makes one gRPC call and one HTTP call to a frontend, in the same way as a client.

Run the program with ``python -m penstock_frontend.rpc.first_call``. The chart's ``helm test`` runs this program in a
separate pod. The program prints the answers. The exit code is 1 if a call failed.
"""

import argparse
import asyncio
import http.client
import json
import ssl
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec
from cryptography import x509

from penstock.common.v1 import sampling_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc
from penstock_common.addresses import split
from penstock_common.config.sections import ClientTlsConfig
from penstock_common.errors import WRONG_MODEL_KIND, PenstockError, RequestFailed
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.credentials import NO_TLS, ClientCredentials
from penstock_common.rpc.status import from_rpc_error

_NEEDS_KEY = "frontends require an API key or a token; set the chart's test.keySecret.name to a Secret that contains it"


class CallError(PenstockError):
    """Raised if a call failed. The message names the call, the address and the error."""


class FirstCall(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the two calls. ``grpc`` and ``http`` are the addresses of the frontend, as host:port."""

    grpc: str
    http: str
    prompt: str
    max_tokens: int
    timeout: float
    """Timeout of both calls together, in seconds."""
    certificate: str = ""
    """Path of the file with the frontends' TLS certificate. Empty means no TLS. The program trusts exactly this
    certificate, and does not check who issued it. The program compares the server's name with the first DNS name in the
    certificate instead of the address, because certificates seldom contain addresses of pods.
    """
    key: str = ""
    """API key or token for the calls. Empty means that the calls have no credentials."""


async def call(options: FirstCall) -> list[str]:
    """Make both calls. Return one line of text for each call.

    Raises CallError, and ConfigError if the certificate cannot be read.
    """
    started = time.monotonic()
    try:
        async with asyncio.timeout(options.timeout):
            name, kind, said = await _over_grpc(options)
        left = options.timeout - (time.monotonic() - started)
        return [said, await asyncio.to_thread(_over_http, options, name, kind, left)]
    except TimeoutError:
        certificate = ", and that the certificate is theirs" if options.certificate else ""
        raise CallError(f"no answer within {options.timeout:g} s; check that engines are ready{certificate}") from None


async def _over_grpc(options: FirstCall) -> tuple[str, str, str]:
    """Make the gRPC call. Return the model's name, what the model computes, and a line of text about the call."""
    metadata = [("authorization", f"Bearer {options.key}")] if options.key else []
    async with make_channel(options.grpc, credentials=_credentials(options)) as channel:
        stub = service_pb2_grpc.InferenceServiceStub(channel)
        try:
            listed: Any = await stub.ListModels(pb.ListModelsRequest(), metadata=metadata, wait_for_ready=True)
            model = listed.models[0]  # adapters, aliases and further models follow
            if not model.capabilities:
                # no engine is ready; the frontend holds the call, which makes the coordinator start an engine if the
                # pool is scaled to zero
                await _until_an_engine_is_up(stub, options, model.name, metadata)
                listed = await stub.ListModels(pb.ListModelsRequest(), metadata=metadata)
                model = listed.models[0]
            kind = next((kind for kind in _CALLS if kind in model.capabilities), "generate")
            answer = await _CALLS[kind](stub, options, model.name, metadata)
        except grpc.aio.AioRpcError as e:
            raise _failed("gRPC", options.grpc, from_rpc_error(e)) from None
    return model.name, kind, f"gRPC {options.grpc}: {model.name} {answer}"


async def _until_an_engine_is_up(stub: Any, options: FirstCall, model: str, metadata: Any) -> None:
    """Wait until an engine is ready, by making a call that the frontend holds until then.

    If the engines only compute embeddings, the frontend then refuses the call.
    """
    try:
        await _generate(stub, options, model, metadata)
    except grpc.aio.AioRpcError as e:
        if from_rpc_error(e).reason != WRONG_MODEL_KIND:
            raise


async def _generate(stub: Any, options: FirstCall, model: str, metadata: Any) -> str:
    params = sampling_pb2.SamplingParams(max_tokens=options.max_tokens)
    request = pb.GenerateRequest(model=model, text=options.prompt, sampling_params=params)
    text = "".join([piece.text async for piece in stub.Generate(request, metadata=metadata)])
    return f"generated {text!r}"


async def _embed(stub: Any, options: FirstCall, model: str, metadata: Any) -> str:
    request = pb.EmbedRequest(model=model, inputs=[pb.PoolingInput(text=options.prompt)])
    response = await stub.Embed(request, metadata=metadata)
    return f"returned an embedding of shape {list(response.embeddings[0].shape)}"


async def _score(stub: Any, options: FirstCall, model: str, metadata: Any) -> str:
    text = pb.PoolingInput(text=options.prompt)
    response = await stub.Score(pb.ScoreRequest(model=model, query=text, documents=[text]), metadata=metadata)
    return f"scored {list(response.scores)}"


async def _classify(stub: Any, options: FirstCall, model: str, metadata: Any) -> str:
    request = pb.ClassifyRequest(model=model, inputs=[pb.PoolingInput(text=options.prompt)])
    response = await stub.Classify(request, metadata=metadata)
    return f"classified {len(response.results)} input(s)"


_CALLS = {"generate": _generate, "embed": _embed, "score": _score, "classify": _classify}


def _over_http(options: FirstCall, model: str, kind: str, left: float) -> str:
    """Make the HTTP call, which may take ``left`` seconds. Return a line of text about the call.

    If the model computes neither text nor embeddings, the call lists the models instead.
    """
    if kind == "generate":
        body = {"model": model, "prompt": options.prompt, "max_tokens": options.max_tokens}
        answer = _request(options, left, "POST", "/v1/completions", body)
        return f"HTTP {options.http}: {model} generated {answer['choices'][0]['text']!r}"
    if kind == "embed":
        answer = _request(options, left, "POST", "/v1/embeddings", {"model": model, "input": options.prompt})
        return f"HTTP {options.http}: {model} returned an embedding of shape [{len(answer['data'][0]['embedding'])}]"
    answer = _request(options, left, "GET", "/v1/models", None)
    return f"HTTP {options.http}: lists {answer['data'][0]['id']}"


def _request(options: FirstCall, left: float, method: str, path: str, body: dict[str, Any] | None) -> Any:
    host, port = split(options.http)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {options.key}"} if options.key else {})
    connection = http.client.HTTPConnection(host, port, timeout=left)
    if options.certificate:
        connection = _Pinned(host, port, timeout=left, certificate=options.certificate)
    try:
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as e:
        raise CallError(f"FAILED: HTTP {options.http}{path}: {e}") from None
    finally:
        connection.close()
    if response.status == http.HTTPStatus.UNAUTHORIZED:
        raise CallError(f"FAILED: HTTP {options.http}{path}: {response.status}: {_NEEDS_KEY}")
    if response.status != http.HTTPStatus.OK:
        raise CallError(f"FAILED: HTTP {options.http}{path}: {response.status} {text}")
    return json.loads(text)


class _Pinned(http.client.HTTPSConnection):
    """HTTPS connection to a server whose certificate is known. The certificate need not contain the address of the
    server.
    """

    def __init__(self, host: str, port: int, *, timeout: float, certificate: str) -> None:
        self._own = ssl.create_default_context(cafile=certificate)
        # accept a trusted certificate even if it is not the certificate of a certificate authority
        self._own.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        self._name = _name_in(certificate)
        super().__init__(host, port, timeout=timeout, context=self._own)

    def connect(self) -> None:
        """Connect, and check that the server's certificate has the expected name."""
        http.client.HTTPConnection.connect(self)
        self.sock = self._own.wrap_socket(self.sock, server_hostname=self._name)


def _credentials(options: FirstCall) -> ClientCredentials:
    if not options.certificate:
        return NO_TLS
    tls = ClientTlsConfig(ca=options.certificate, server_name=_name_in(options.certificate))
    return ClientCredentials(tls, field="certificate")


def _name_in(path: str) -> str:
    """Return the first DNS name in the certificate file. Raises CallError if the certificate has no DNS name."""
    try:
        certificate = x509.load_pem_x509_certificate(Path(path).read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise CallError(
            f"{path}: the certificate has no subject alternative names, so clients will not accept it"
        ) from None
    except ValueError as e:
        raise CallError(f"{path}: {e}") from None
    for name in names.get_values_for_type(x509.DNSName):
        return name.replace("*", "test")
    raise CallError(f"{path}: the certificate has no DNS name")


def _failed(protocol: str, address: str, error: RequestFailed) -> CallError:
    hint = f"; {_NEEDS_KEY}" if error.code == "UNAUTHENTICATED" else ""
    return CallError(f"FAILED: {protocol} {address}: {error.code}: {error.message}{hint}")


def parse(arguments: Sequence[str] | None = None) -> FirstCall:
    """Parse the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="first_call", description="One call over gRPC and one over HTTP.")
    parser.add_argument("--grpc", required=True, help="Address (host:port) of the gRPC API")
    parser.add_argument("--http", required=True, help="Address (host:port) of the HTTP API")
    parser.add_argument(
        "--prompt", default="Once upon a time", help="Text to continue, or to embed (default: %(default)r)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=16, help="Number of tokens to generate (default: %(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=240, help="Total timeout in seconds (default: %(default)g)")
    parser.add_argument("--certificate", default="", help="File with the frontends' certificate (default: no TLS)")
    parser.add_argument("--key-file", default="", help="File with an API key or a token (default: none)")
    found = vars(parser.parse_args(arguments))
    file = found.pop("key_file")
    return FirstCall(**found, key=Path(file).read_text(encoding="utf-8").strip() if file else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make both calls, and print their results. Return the exit code of the program."""
    try:
        lines = asyncio.run(call(parse(arguments)))
    except (PenstockError, OSError) as e:
        sys.stdout.write(f"{e}\n")
        return 1
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
