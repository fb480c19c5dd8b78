"""Continue many prompts at once, in asyncio: one channel, one call per prompt, all streamed together."""

import argparse
import asyncio

from connection import connect_aio

from penstock.common.v1 import sampling_pb2
from penstock.inference.v1 import messages_pb2, service_pb2_grpc


async def main() -> None:
    """Print each text when it is complete, in the order of the prompts."""
    args = parse_arguments()
    async with connect_aio(args.address) as channel:
        stub = service_pb2_grpc.InferenceServiceStub(channel)
        calls = (continued(stub, prompt, args) for prompt in args.prompts)
        for prompt, text in zip(args.prompts, await asyncio.gather(*calls), strict=True):
            print(f"{prompt}: {text}")


async def continued(stub: "service_pb2_grpc.InferenceServiceAsyncStub", prompt: str, args: argparse.Namespace) -> str:
    """The continuation of a prompt. Cancelling the task cancels the call. Raises grpc.aio.AioRpcError."""
    params = sampling_pb2.SamplingParams(max_tokens=args.max_tokens)
    call = stub.Generate(messages_pb2.GenerateRequest(text=prompt, sampling_params=params), timeout=args.timeout)
    return "".join([response.text async for response in call])


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--address", default="localhost:50051", help="host:port of the server (%(default)s)")
    parser.add_argument("--max-tokens", type=int, help="longest output in tokens")
    parser.add_argument("--timeout", type=float, help="deadline of each call in seconds")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
