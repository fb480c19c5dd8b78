"""Time to pull a prompt's blocks from another engine, relative to the time to compute it.

``python -m tests.benchmarks.kv_transfer MODEL [--tokens 1024] [--threads 2] [--runs 7] [--transports grpc
shared_memory]`` runs two processes with one engine each; ``make_model`` makes MODEL. Times are from the arrival of a
request to its first token. Both include at least a step of one token, which takes as long as a prompt in the cache.
Results are medians.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from tests.fakes.engines.transferring_engine import TransferringEngine


def sections(args: argparse.Namespace, transport: str) -> dict[str, Any]:
    """Return the configuration sections of both engines."""
    return {
        "cache": {"block_size": 16, "num_blocks": args.tokens},
        "scheduler": {"max_num_batched_tokens": args.tokens},
        "executor": {"num_threads": args.threads},
        "kv_transfer": {"transport": transport, "lease": 60.0},
    }


def prompt(args: argparse.Namespace, run: int) -> list[int]:
    """Return a different prompt for each run."""
    return [3 + (run * 7919 + place * 31) % 900 for place in range(args.tokens)]


def source(args: argparse.Namespace, transport: str, to: Connection) -> None:
    """Run the source process: compute requested prompts, and hand the requests over."""
    with ExitStack() as ends:
        engine = TransferringEngine(args.model, "source", ends, **sections(args, transport))
        to.send(None)
        while (run := to.recv()) is not None:
            params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
            request = EngineCoreRequest(
                request_id=str(run),
                prompt_token_ids=prompt(args, run),
                sampling_params=params,
                handoff_after_tokens=1,
            )
            outputs = engine.run(request)[request.request_id]
            to.send(([token for output in outputs for token in output.new_token_ids], outputs[-1].kv_source))


class Times(NamedTuple):
    """Seconds to the first token of a computed prompt, of a prompt whose blocks are pulled, and of a cached prompt."""

    computed: float
    loaded: float
    cached: float


class Pair:
    """An engine in this process that pulls from an engine in another process. ``ends`` closes both engines."""

    def __init__(self, args: argparse.Namespace, transport: str, ends: ExitStack) -> None:
        self._args = args
        context = get_context("spawn")
        self._source, theirs = context.Pipe()
        process = context.Process(target=source, args=(args, transport, theirs), daemon=True)
        process.start()
        ends.callback(process.join)
        ends.callback(self._source.send, None)
        self._engine = TransferringEngine(args.model, "target", ends, **sections(args, transport))
        self._source.recv()
        self._runs = 0

    def run(self) -> Times:
        """Measure one new prompt. Raises AssertionError if a transfer failed or tokens differ."""
        engine, run, params = self._engine, self._runs, SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
        self._source.send(run)
        prior, given = self._source.recv()
        plain = EngineCoreRequest(
            request_id=f"c{run}", prompt_token_ids=prompt(self._args, run), sampling_params=params
        )
        computed, whole = self._first(plain)
        engine.core.scheduler.reset_prefix_cache()
        request = msgspec.structs.replace(
            plain, request_id=f"l{run}", prior_output_token_ids=prior, kv_source=given, attempt=1
        )
        loaded, rest = self._first(request)
        cached, _ = self._first(msgspec.structs.replace(request, request_id=f"a{run}", kv_source=None))
        engine.core.scheduler.reset_prefix_cache()
        assert whole == prior + rest
        failed = engine.value("penstock:kv_transfer_failures_total")
        assert not failed, f"{failed} failures"
        self._runs += 1
        return Times(computed, loaded, cached)

    def _first(self, request: EngineCoreRequest) -> tuple[float, list[int]]:
        """Return the seconds to the first token, and all tokens."""
        began = time.monotonic()
        outputs = self._engine.run(request)[request.request_id]
        return self._engine.first_output - began, [token for each in outputs for token in each.new_token_ids]

    @property
    def moved(self) -> float:
        """Return the transferred bytes of a prompt's blocks."""
        return self._engine.value("penstock:kv_transfer_bytes_total", direction="in") / self._runs


def measure(args: argparse.Namespace, transport: str) -> tuple[list[Times], float]:
    """Measure all runs after a warm-up run. Returns their times, and the bytes of a prompt's blocks."""
    with ExitStack() as ends:
        pair = Pair(args, transport, ends)
        times = [pair.run() for _ in range(args.runs + 1)]
        return times[1:], pair.moved


def main() -> None:
    """Print a line per transport."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of each engine; only one engine computes at a time"
    )
    parser.add_argument("--transports", nargs="+", default=["grpc", "shared_memory"])
    args = parser.parse_args()
    for transport in args.transports:
        times, moved = measure(args, transport)
        computed, loaded, cached = ([getattr(each, name) for each in times] for name in Times._fields)
        whole, step = statistics.median(computed), statistics.median(cached)
        load = statistics.median(loaded)
        print(
            f"{transport}: {moved / 2**20:.1f} MiB, computed in {whole * 1000:.0f} ms "
            f"({min(computed) * 1000:.0f} to {max(computed) * 1000:.0f}), loaded in {load * 1000:.1f} ms "
            f"({min(loaded) * 1000:.1f} to {max(loaded) * 1000:.1f}): {load / whole:.1%}; without the step of "
            f"{step * 1000:.1f} ms {(load - step) / whole:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
