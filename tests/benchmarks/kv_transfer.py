"""What it takes to have a prompt's blocks brought from another engine, over what it takes to compute it.

``python -m tests.benchmarks.kv_transfer MODEL [--tokens 1024] [--threads 2] [--runs 7] [--transports grpc shared_memory]``: two
processes of an engine each, MODEL is what ``make_model`` makes. Times are from the arrival of a request to its first token, so
both have a step of one token in them at least, as long as that of a prompt in the cache takes; compared are medians.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from tests.fakes.engines.transferring_engine import TransferringEngine


def sections(args: argparse.Namespace, transport: str) -> dict[str, Any]:
    """Of both engines."""
    return {
        "cache": {"block_size": 16, "num_blocks": args.tokens},
        "scheduler": {"max_num_batched_tokens": args.tokens},
        "executor": {"num_threads": args.threads},
        "kv_transfer": {"transport": transport, "lease": 60.0},
    }


def prompt(args: argparse.Namespace, run: int) -> list[int]:
    """Another one each time."""
    return [3 + (run * 7919 + place * 31) % 900 for place in range(args.tokens)]


def source(args: argparse.Namespace, transport: str, to: Connection) -> None:
    """Compute the prompts that are asked for, and hand them over."""
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


def measure(args: argparse.Namespace, transport: str) -> tuple[list[float], list[float], list[float], float]:
    """Seconds to compute, to load, and with all of it in the cache, one of each per run, and bytes of a prompt's blocks."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=source, args=(args, transport, theirs), daemon=True)
    process.start()
    computed, loaded, cached = [], [], []
    with ExitStack() as ends:
        engine = TransferringEngine(args.model, "target", ends, **sections(args, transport))
        ours.recv()
        params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
        for run in range(args.runs + 1):
            ours.send(run)
            prior, given = ours.recv()
            request = EngineCoreRequest(
                request_id=f"c{run}", prompt_token_ids=prompt(args, run), sampling_params=params
            )
            began = time.monotonic()
            whole = engine.run(request)[request.request_id]
            computed.append(engine.first_output - began)
            engine.core.scheduler.reset_prefix_cache()
            request = EngineCoreRequest(
                request_id=f"l{run}",
                prompt_token_ids=prompt(args, run),
                sampling_params=params,
                prior_output_token_ids=prior,
                kv_source=given,
                attempt=1,
            )
            began = time.monotonic()
            rest = engine.run(request)[request.request_id]
            loaded.append(engine.first_output - began)
            again = msgspec.structs.replace(request, request_id=f"a{run}", kv_source=None)
            began = time.monotonic()
            engine.run(again)
            cached.append(engine.first_output - began)
            engine.core.scheduler.reset_prefix_cache()
            tokens = [token for output in whole for token in output.new_token_ids]
            assert tokens == prior + [token for output in rest for token in output.new_token_ids]
        ours.send(None)
        process.join()
        moved = engine.value("penstock:kv_transfer_bytes_total", direction="in") / (args.runs + 1)
        failed = engine.value("penstock:kv_transfer_failures_total")
        assert not failed, f"{failed} failures"
    return computed[1:], loaded[1:], cached[1:], moved


def main() -> None:
    """Print a line per transport."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of each engine; only one of both computes at a time")
    parser.add_argument("--transports", nargs="+", default=["grpc", "shared_memory"])
    args = parser.parse_args()
    for transport in args.transports:
        computed, loaded, cached, moved = measure(args, transport)
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
