"""Services without a model: real processes with real gRPC servers, for tests of the command that runs them.

``FAKE_<NAME>`` in the environment (``FAKE_ENGINE_1``) makes a service misbehave: ``exit``, ``ignore-sigterm``.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import yaml

from penstock.common.v1 import finish_pb2, logprobs_pb2, stats_pb2
from penstock.inference.v1 import messages_pb2, service_pb2_grpc
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import InvalidArgument
from penstock_common.rpc.server import RpcServer

EXIT_CODE = 3
MODEL = messages_pb2.Model(name="fake", max_model_len=2048, num_engines=64)


class FakeInference(service_pb2_grpc.InferenceServiceServicer):
    """Repeats the prompt word by word, for each of n sequences in turn; the log-probability of word i is -i, and its
    rank i + 1. ``wait`` hangs after the first word, ``wrong`` is refused.
    """

    def __init__(self, model_name: str = "fake") -> None:
        self.model_name = model_name
        self.requests: list[messages_pb2.GenerateRequest] = []
        self.cancelled = asyncio.Event()

    async def ListModels(self, request: Any, context: Any) -> messages_pb2.ListModelsResponse:
        model = messages_pb2.Model()
        model.CopyFrom(MODEL)
        model.name = self.model_name
        return messages_pb2.ListModelsResponse(models=[model])

    async def Generate(
        self, request: messages_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[messages_pb2.GenerateResponse]:
        self.requests.append(request)
        if request.text == "wrong":
            raise InvalidArgument("sampling_params.top_p is 7; it must be in (0, 1]", field="sampling_params.top_p")
        words = request.text.split()
        params = request.sampling_params
        indexes = range(params.n if params.HasField("n") else 1)
        for i, word in enumerate(words):
            for index in reversed(indexes):
                text = word if i == 0 else f" {word}"
                response = messages_pb2.GenerateResponse(index=index, text=text, token_ids=[i])
                if params.HasField("logprobs"):
                    response.logprobs.MergeFrom(logprobs(text, i))
                yield response
            if request.text == "wait":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
        for index in reversed(indexes):
            yield messages_pb2.GenerateResponse(
                index=index,
                finish_reason=finish_pb2.FINISH_REASON_LENGTH,
                usage=stats_pb2.Usage(prompt_tokens=len(words), cached_tokens=1, completion_tokens=len(words)),
            )


def logprobs(text: str, i: int) -> logprobs_pb2.Logprobs:
    """Return the log-probabilities of one position: the word and one other word."""
    return logprobs_pb2.Logprobs(
        offsets=[0, 2], token_ids=[i, 0], logprobs=[-float(i), 0.0], ranks=[i + 1, 1], tokens=[text, " likely"]
    )


def main(service: str) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, type=argparse.FileType())
    config = yaml.safe_load(parser.parse_args().config)
    name = config.get("engine_id") or config.get("frontend_id") or service
    asyncio.run(serve(service, config, os.environ.get(f"FAKE_{name.upper().replace('-', '_')}", "")))


async def serve(service: str, config: dict[str, Any], fault: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if fault == "exit":
        print("cannot go on", flush=True)
        sys.exit(EXIT_CODE)
    server = RpcServer(ServerConfig(**config["server"]), service_names=())
    others: list[asyncio.Server] = []
    if service == "frontend":
        inference = FakeInference(config["model"]["served_model_name"])  # type: ignore[abstract]
        service_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server.server)
        others = [
            await asyncio.start_server(
                lambda *_: None,
                config[key]["host"],
                config[key]["port"],
                reuse_port=config[key].get("reuse_port", False),
            )
            for key in ("http", "admin", "metrics")
            if key in config
        ]
    await server.start()
    await server.set_serving(True)
    print(f"ready with pid {os.getpid()} on port {server.port}", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    if fault == "ignore-sigterm":
        await asyncio.Event().wait()
    await server.stop(0)
    for other in others:
        other.close()
    print("stopped", flush=True)
