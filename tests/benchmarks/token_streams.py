"""Streams of a public port, with the arrival time of each token."""

import random
import time
from collections.abc import Iterable, Sequence

import grpc
import msgspec

from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc


class Stream(msgspec.Struct):
    """Result of a request. Times are of ``time.perf_counter``."""

    sent: float = 0.0
    tokens: list[int] = []
    times: list[float] = []
    """Arrival time of each token in ``tokens``."""
    error: str = ""
    done: bool = False

    @property
    def ttft(self) -> float:
        """Return the seconds to the first token."""
        return self.times[0] - self.sent

    def gaps(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Return the seconds between tokens, for gaps that end in an interval.

        Tokens of the same message have gaps of 0.
        """
        pairs = zip(self.times, self.times[1:], strict=False)
        return [after - before for before, after in pairs if begin <= after < end]


def prompt(number: int, length: int, *, vocab_size: int = 2000) -> list[int]:
    """Return random token ids, different for each number."""
    return random.Random(number).choices(range(10, vocab_size), k=length)


async def follow(
    stub: "rpc.InferenceServiceAsyncStub", prompt_token_ids: Sequence[int], max_tokens: int, stream: Stream
) -> Stream:
    """Request a greedy output of exactly ``max_tokens`` tokens, and record its messages in ``stream``."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt_token_ids),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False),
    )
    stream.sent = time.perf_counter()
    try:
        async for response in stub.Generate(request):
            now = time.perf_counter()
            stream.tokens.extend(response.token_ids)
            stream.times.extend([now] * len(response.token_ids))
        stream.done = len(stream.tokens) == max_tokens
    except grpc.aio.AioRpcError as e:
        stream.error = f"{e.code().name}: {e.details()}"
    return stream


def quantile(values: Iterable[float], share: float) -> float:
    """Return the quantile ``share`` of the values. Returns 0.0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
