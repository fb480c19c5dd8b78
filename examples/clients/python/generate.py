"""Stream the continuation of a prompt from a Penstock server."""

import argparse
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Iterator

import grpc
from connection import authorization, connect, credentials
from google.rpc import error_details_pb2, status_pb2

from penstock.common.v1 import sampling_pb2
from penstock.inference.v1 import messages_pb2, service_pb2_grpc

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main() -> int:
    """Print the text as it arrives; of several sequences each when it is complete. Returns the exit code."""
    args = parse_arguments()
    sequences: defaultdict[int, str] = defaultdict(str)
    tls = credentials(args.ca) if args.tls or args.ca else None
    with connect(args.address, tls) as channel:
        stub = service_pb2_grpc.InferenceServiceStub(channel)
        metadata = authorization(os.environ.get("PENSTOCK_API_KEY", ""))
        call = stub.Generate(build_request(args), timeout=args.timeout, metadata=metadata)
        try:
            for response in call:
                if not args.n:
                    print(response.text, end="", flush=True)
                else:
                    sequences[response.index] += response.text
                    if response.finish_reason:
                        print(f"[{response.index}] {sequences[response.index]}", flush=True)
                for line in describe_logprobs(response):
                    print(line, file=sys.stderr)
        except KeyboardInterrupt:
            call.cancel()  # the server ends the work in the engine
            return EXIT_INTERRUPTED
        except grpc.RpcError as error:
            print("\n".join(describe(error)), file=sys.stderr)
            return EXIT_FAILED
        finally:
            if not args.n:
                print()
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--address", default="localhost:50051", help="host:port of the server (%(default)s)")
    parser.add_argument("--model", default="", help="name of the model; by default the one that is served")
    parser.add_argument("--max-tokens", type=int, help="longest output in tokens")
    parser.add_argument("--temperature", type=float, help="0 is greedy")
    parser.add_argument("--seed", type=int, help="makes the output reproducible")
    parser.add_argument("--stop", action="append", default=[], help="a string that ends the output; repeatable")
    parser.add_argument("--n", type=int, help="number of sequences; sequence i has seed + i")
    parser.add_argument("--logprobs", type=int, help="log-probabilities of each token and this many likeliest ones")
    parser.add_argument("--timeout", type=float, help="deadline of the call in seconds")
    parser.add_argument("--tls", action="store_true", help="encrypt the connection")
    parser.add_argument("--ca", default="", help="file of the certificates to trust; with it, --tls is not needed")
    return parser.parse_args()


def build_request(args: argparse.Namespace) -> messages_pb2.GenerateRequest:
    """The request. A field left out takes the model's default, so only what was asked for is set."""
    sampling_params = sampling_pb2.SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stop=args.stop,
        n=args.n,
        logprobs=args.logprobs,
    )
    return messages_pb2.GenerateRequest(model=args.model, text=args.prompt, sampling_params=sampling_params)


def describe_logprobs(response: messages_pb2.GenerateResponse) -> Iterator[str]:
    """A line per new token: its entries, the chosen token first. Entries of token i are offsets[i] to offsets[i + 1]."""
    logprobs = response.logprobs
    for start, end in itertools.pairwise(logprobs.offsets):
        entries = (f"{logprobs.tokens[i]!r} {logprobs.logprobs[i]:.3f}" for i in range(start, end))
        yield f"[{response.index}] " + ", ".join(entries)


def describe(error: grpc.RpcError) -> Iterator[str]:
    """Lines that tell the code and the message of a failed call, and its ``google.rpc`` details."""
    yield f"{error.code().name}: {error.details()}"
    metadata = {entry.key: entry.value for entry in error.trailing_metadata() or ()}
    status = status_pb2.Status.FromString(metadata.get("grpc-status-details-bin", b""))
    for detail in status.details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            yield f"  reason: {info.reason}"
        elif detail.Unpack(bad):
            for violation in bad.field_violations:
                yield f"  field: {violation.field}: {violation.description}"
        elif detail.Unpack(retry):
            yield f"  retry after: {retry.retry_delay.ToTimedelta().total_seconds():g} s"


if __name__ == "__main__":
    sys.exit(main())
