"""Client that sends requests over gRPC and HTTP, retries refused requests on other frontends, and records answers."""

import asyncio
import contextlib
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any

import grpc
import httpx
import msgspec

from penstock.common.v1 import finish_pb2
from penstock.common.v1.logprobs_pb2 import Logprobs
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc
from penstock_common.rpc.channel import make_channel
from tests.chaos.outcome import Outcome, Output
from tests.chaos.requests import Request

RETRY_AFTER = 0.2
REFUSALS = ("UNAVAILABLE", "CANCELLED")
"""Codes of refusals by a frontend. gRPC itself cancels calls that reach a server while it closes."""
REFUSED_WITHIN = 25.0
"""Maximum seconds until a refusal, on a busy machine.

A later error means that the request waited 30 s for an engine.
"""
_NOT_WRITTEN = "Internal error from Core"
"""Message of gRPC's client when a call ends, by its deadline or its server, before the request is written."""
_CLOCKS_DIFFER = 0.02
STATUS = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class Address(msgspec.Struct, frozen=True):
    """Address of a frontend. ``http`` is its HTTP port; 0 if it is not needed."""

    grpc: str
    http: int = 0


class _Frontend:
    """Connections to one frontend."""

    def __init__(self, address: Address) -> None:
        self.channel = make_channel(address.grpc)
        self.stub = service_pb2_grpc.InferenceServiceStub(self.channel)
        url = f"http://127.0.0.1:{address.http}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.http = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, verify=False, trust_env=False)

    async def close(self) -> None:
        await self.channel.close()
        await self.http.aclose()


class Client:
    """A client of one or more frontends, which uses the frontends in turn.

    If a frontend refuses a request before the first output, the client sends the request to the next frontend, at most
    ``retries`` times. A load balancer with a retry policy does the same. The client calls ``on_tokens`` with the number
    of tokens in each message.
    """

    def __init__(
        self, *frontends: Address, retries: int = 0, on_tokens: Callable[[int], object] = lambda count: None
    ) -> None:
        self._addresses = frontends
        self._retries = retries
        self._on_tokens = on_tokens

    async def __aenter__(self) -> "Client":
        self._frontends = [_Frontend(address) for address in self._addresses]
        self._turns = itertools.cycle(self._frontends)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(frontend.close() for frontend in self._frontends))

    async def send(self, request: Request, *, seconds: float | None = None, into: Outcome | None = None) -> Outcome:
        """Send a request and read it to its end. Errors of the server are part of the outcome.

        Cancelling the task cancels the call.

        Args:
            seconds: Deadline of the request.
            into: Outcome to update with each message.
        """
        outcome = Outcome() if into is None else into
        loop = asyncio.get_running_loop()
        for attempt in range(self._retries + 1):
            began = loop.time()
            outcome.error = outcome.message = ""
            await self._try(next(self._turns), request, outcome, seconds)
            refused = outcome.error in REFUSALS and not outcome.outputs and loop.time() - began < REFUSED_WITHIN
            if not refused or attempt == self._retries:
                break
            outcome.refusals.append(outcome.error)
            if (attempt + 1) % len(self._frontends) == 0:  # all frontends refused the request
                await asyncio.sleep(RETRY_AFTER)
        outcome.seconds = loop.time() - outcome.began
        return outcome

    async def _try(self, frontend: _Frontend, request: Request, outcome: Outcome, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            if request.way.startswith("/"):
                async with asyncio.timeout(seconds):
                    await self._over_http(frontend.http, request, outcome)
            else:
                await self._over_grpc(frontend.stub, request, outcome, seconds)
        except grpc.aio.AioRpcError as e:
            late = seconds is not None and loop.time() - began > seconds - _CLOCKS_DIFFER
            code = "DEADLINE_EXCEEDED" if late and e.details() == _NOT_WRITTEN else e.code().name
            outcome.error, outcome.message = code, e.details() or ""
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as e:
            outcome.error, outcome.message = "UNAVAILABLE", repr(e)
        except TimeoutError:
            outcome.error = "DEADLINE_EXCEEDED"

    async def _over_grpc(self, stub: Any, request: Request, outcome: Outcome, seconds: float | None) -> None:
        message = request.message
        if request.way == "Embed":
            await stub.Embed(message, timeout=seconds)
            return
        if request.way == "GenerateSession":
            responses = _in_session(stub, message, outcome, seconds)
        else:
            responses = getattr(stub, request.way)(message, timeout=seconds)
        async for response in responses:
            text = response.content if request.way == "Chat" else response.text
            self._take(outcome, outcome.at(response.index), response, text, cumulative=request.cumulative)

    def _take(self, outcome: Outcome, output: Output, response: Any, text: str, *, cumulative: bool) -> None:
        outcome.arrived(output)
        found = _chosen(response.logprobs)
        before = len(output.token_ids)
        if cumulative:
            output.text, output.token_ids, output.logprobs = text, list(response.token_ids), found
        else:
            output.text += text
            output.token_ids += response.token_ids
            output.logprobs += found
        self._on_tokens(len(output.token_ids) - before)
        if response.finish_reason:
            output.finish = finish_pb2.FinishReason.Name(response.finish_reason).removeprefix("FINISH_REASON_").lower()
            which = response.stop_reason.WhichOneof("reason")
            output.stop = str(getattr(response.stop_reason, which)) if which else ""
            output.usage = (response.usage.prompt_tokens, response.usage.completion_tokens)

    async def _over_http(self, http: httpx.AsyncClient, request: Request, outcome: Outcome) -> None:
        async with http.stream("POST", request.way, json=request.message) as response:
            if response.status_code != 200:
                outcome.error = STATUS.get(response.status_code, f"HTTP {response.status_code}")
                outcome.message = (await response.aread()).decode()
                return
            done = False
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    self._take_event(json.loads(line.removeprefix("data: ")), outcome)
            if not done and not outcome.error:
                outcome.error, outcome.message = "UNAVAILABLE", "the stream ended without [DONE]"

    def _take_event(self, event: dict[str, Any], outcome: Outcome) -> None:
        if error := event.get("error"):
            unavailable = error["type"] == "service_unavailable_error"
            outcome.error, outcome.message = "UNAVAILABLE" if unavailable else error["type"], error["message"]
        for choice in event.get("choices", ()):
            output = outcome.at(choice["index"])
            outcome.arrived(output)
            delta = choice.get("delta")
            output.text += (delta.get("content") or "") if delta is not None else choice["text"]
            tokens = choice.get("token_ids") or []
            output.token_ids += tokens
            self._on_tokens(len(tokens))
            if logprobs := choice.get("logprobs"):
                output.logprobs += [entry["logprob"] for entry in logprobs["content"]]
            if choice.get("finish_reason"):
                output.finish, output.stop = choice["finish_reason"], str(choice.get("stop_reason") or "")
        if usage := event.get("usage"):
            outcome.at(0).usage = (usage["prompt_tokens"], usage["completion_tokens"])


def _chosen(logprobs: Logprobs) -> list[float]:
    return [logprobs.logprobs[offset] for offset in logprobs.offsets[:-1]]


async def _in_session(
    stub: Any, message: pb.GenerateRequest, outcome: Outcome, seconds: float | None
) -> AsyncIterator[Any]:
    """Yield the outputs of a request, sent in its own GenerateSession."""
    own = pb.GenerateRequest()
    own.CopyFrom(message)
    own.request_id = uuid.uuid4().hex
    call = stub.GenerateSession(timeout=seconds)
    try:
        await call.write(pb.GenerateSessionRequest(generate=own))
        with contextlib.suppress(grpc.aio.InternalError):  # the call has ended, and reading raises the reason
            await call.done_writing()
        async for response in call:
            if response.HasField("error"):
                outcome.error, outcome.message = response.error.error.code, response.error.error.message
            else:
                yield response.output
    finally:
        call.cancel()


async def send_all(
    client: Client,
    load: Sequence[Sequence[Request]],
    *,
    on_end: Callable[[int, int, Outcome], object] = lambda stream, number, outcome: None,
) -> list[list[Outcome]]:
    """Send the requests of all streams. The streams run concurrently; each sends its requests one after the other.

    Args:
        load: Requests of each stream.
        on_end: Called at the end of each request, with the stream's number and the request's number.
    """

    async def send(stream: int, requests: Sequence[Request]) -> list[Outcome]:
        outcomes = []
        for number, request in enumerate(requests):
            outcomes.append(await client.send(request))
            on_end(stream, number, outcomes[-1])
        return outcomes

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(stream, requests)) for stream, requests in enumerate(load)]
    return [task.result() for task in tasks]
