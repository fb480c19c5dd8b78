"""Commands of the client. Each function is one command and returns an exit code."""

import asyncio
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import AsyncIterator

import grpc
from errors import describe

from penstock.common.v1.finish_pb2 import FINISH_REASON_ABORT
from penstock.inference.v1 import messages_pb2
from penstock_client import AsyncClient, ChatMessage, PenstockError, SamplingParams
from penstock_client.errors import of_call, of_session

EXIT_FAILED = 1


def params(args: Namespace) -> SamplingParams:
    """Return the sampling parameters of the command line. For an omitted field (None), the model's default applies."""
    return SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, stop=args.stop)


def tell(line: str) -> None:
    """Print an error line."""
    print(line, file=sys.stderr, flush=True)


async def generate(client: AsyncClient, args: Namespace) -> int:
    """Print the text as it arrives."""
    async for piece in client.stream(args.prompt, params(args), model=args.model):
        print(piece.text, end="", flush=True)
    return 0


async def chat(client: AsyncClient, args: Namespace) -> int:
    """Print the answer as it arrives."""
    turns = [("system", args.system)] if args.system else []
    messages = [ChatMessage(role=role, content=text) for role, text in [*turns, ("user", args.message)]]
    async for piece in client.stream_chat(messages, params(args), model=args.model):
        print(piece.content, end="", flush=True)
    return 0


class Session:
    """State of one stream with several requests, which are numbered from 0. It collects the text of each request."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._texts: defaultdict[str, str] = defaultdict(str)
        self._messages_of_first = 0
        self._may_end = asyncio.Event()
        self._abort = False
        if args.abort_after is None:
            self._may_end.set()

    async def requests(self) -> AsyncIterator[messages_pb2.GenerateSessionRequest]:
        """Yield the requests, and the cancellation of the first request if the command line asks for it.

        When this iterator ends, gRPC half-closes the stream.
        """
        for number, prompt in enumerate(self._args.prompts):
            request = messages_pb2.GenerateRequest(
                model=self._args.model, request_id=str(number), text=prompt, sampling_params=params(self._args)
            )
            yield messages_pb2.GenerateSessionRequest(generate=request)
        await self._may_end.wait()
        if self._abort:
            yield messages_pb2.GenerateSessionRequest(abort_request_id="0")

    def take(self, response: messages_pb2.GenerateSessionResponse) -> int:
        """Handle a response. Print the text when it is complete, or the error. Returns the exit code."""
        if response.HasField("error"):
            first, *lines = describe(of_session(response.error.error))
            tell("\n".join([f"[{response.error.request_id}] {first}", *lines]))
            self._count(response.error.request_id, ended=True)
            return EXIT_FAILED
        output = response.output
        self._texts[output.request_id] += output.text
        if output.finish_reason:
            aborted = " (aborted)" if output.finish_reason == FINISH_REASON_ABORT else ""
            print(f"[{output.request_id}] {self._texts.pop(output.request_id)}{aborted}", flush=True)
        self._count(output.request_id, ended=bool(output.finish_reason))
        return 0

    def _count(self, request_id: str, *, ended: bool) -> None:
        """Count messages of the first request, for ``--abort-after``."""
        if request_id != "0" or self._may_end.is_set():
            return
        self._messages_of_first += 1
        self._abort = not ended and self._messages_of_first >= self._args.abort_after
        if ended or self._abort:
            self._may_end.set()


async def session(client: AsyncClient, args: Namespace) -> int:
    """Continue all prompts over one stream. Each text is printed when it is complete."""
    running = Session(args)
    call = client.stub.GenerateSession(running.requests(), timeout=args.timeout, metadata=client.metadata)
    try:
        return max([running.take(response) async for response in call], default=0)
    except grpc.aio.AioRpcError as error:
        raise of_call(error) from None


async def load(client: AsyncClient, args: Namespace) -> int:
    """Make many calls of Generate, some of them concurrently, and count them."""
    calls = failed = messages = begun = 0
    start = time.monotonic()

    def more() -> bool:
        if args.seconds is not None:
            return bool(time.monotonic() - start < args.seconds)
        return bool(begun < (args.calls or args.at_once))

    async def one_after_the_other() -> None:
        nonlocal calls, failed, messages, begun
        while more():
            begun += 1
            try:
                async for _ in client.stream(args.prompt, params(args), model=args.model):
                    messages += 1
            except PenstockError as error:
                tell("\n".join(describe(error)))
                failed += 1
            calls += 1

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(args.at_once):
                group.create_task(one_after_the_other())
    finally:
        print(f"calls: {calls}, failed: {failed}, messages: {messages}, seconds: {time.monotonic() - start:.1f}")
    return EXIT_FAILED if failed else 0
