"""Engines killed under transcriptions and embeddings: ``python -m tests.benchmarks.speech_kills``.

The processes are a coordinator, one frontend with two models, and two engines of each model: a small Whisper checkpoint
with random weights, and MiniLM. Clients of both models send requests over gRPC and HTTP at the same time, first without
faults. In the second run, engines of both models are killed (SIGKILL) and restarted, two of each model by default. The
other engine of the model serves meanwhile. Every answer of the second run is compared with that of the first: texts,
segments, token ids, log-probabilities and embeddings.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.benchmarks.peers import machine
from tests.chaos.summary import quantile
from tests.chaos.two_models import SPEECH, TEXT, Result, TwoModels, TwoModelsRequest, embeddings, run, transcriptions


async def measure(args: argparse.Namespace, folder: Path) -> bool:
    """Print the results of both runs. Return whether a request failed or got another answer."""
    load: dict[str, Sequence[TwoModelsRequest]] = {
        SPEECH: transcriptions(args.requests, args.shortest, args.longest),
        TEXT: embeddings(args.requests, args.texts),
    }
    async with TwoModels(folder, positions=args.positions) as cluster:
        calm = await run(cluster, load, clients=args.clients)
        show("undisturbed", calm)
        killed = await run(cluster, load, clients=args.clients, kills=args.kills)
        show("with kills", killed)
    for kill in killed.kills:
        print(json.dumps(msgspec.to_builtins(kill)))
    errors = [*calm.errors(), *killed.errors()]
    wrong = killed.differing(calm)
    print(f"resumed on another engine: {killed.moved}; largest difference of a number: {killed.differences(calm)}")
    print(f"{len(errors)} failed, {len(wrong)} differing", *errors[:12], *wrong[:12], sep="\n")
    return bool(errors or wrong)


def show(name: str, result: Result) -> None:
    """Print number and latency of the requests of each model."""
    for model, answers in result.found.items():
        seconds = [answer.seconds for _, answer in answers]
        times = ", ".join(f"{quantile(seconds, share):.1f}" for share in (0.5, 0.99))
        print(f"{name}, {model}: {len(answers)} requests in {result.seconds:.0f} s; p50, p99: {times} s", flush=True)


def main() -> int:
    """Return 1 if a request failed or got another answer."""
    parser = argparse.ArgumentParser(prog="speech_kills", description=__doc__)
    parser.add_argument("--requests", type=int, default=28, help="requests of each model (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="clients of each model (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=2, help="killed engines of each model (default: %(default)s)")
    parser.add_argument(
        "--shortest", type=float, default=5.0, help="seconds of the shortest sound (default: %(default)s)"
    )
    parser.add_argument(
        "--longest", type=float, default=70.0, help="seconds of the longest sound (default: %(default)s)"
    )
    parser.add_argument("--texts", type=int, default=40, help="texts per embedding request (default: %(default)s)")
    parser.add_argument("--positions", type=int, default=64, help="tokens of a window (default: %(default)s)")
    args = parser.parse_args()
    print(json.dumps({"machine": machine()}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        return int(asyncio.run(measure(args, Path(folder))))


if __name__ == "__main__":
    sys.exit(main())
