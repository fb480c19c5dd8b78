"""Simulated engines: their registrations and reports to the coordinator."""

from collections.abc import Sequence

from penstock.common.v1 import stats_pb2
from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import messages_pb2 as enginecore_pb
from penstock_common.rpc.by_field import to_message
from penstock_common.types.outputs import SchedulerStats

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def register(number: int, *, pool: str = "default", name: str = "penstock-engine") -> pb.EngineReport:
    """Return the registration message of an engine in a pod."""
    return pb.EngineReport(
        register=pb.Register(
            engine_id=f"{name}-6d5f7c9b44-{number:05d}",
            incarnation=f"{number:032x}",
            address=f"10.{number // 65536}.{number // 256 % 256}.{number % 256}:50052",
            model=MODEL,
            pool=pool,
            max_num_seqs=256,
        )
    )


def report(number: int, step: int) -> pb.EngineReport:
    """Return a report of a busy engine. Every count differs from the previous report."""
    stats = SchedulerStats(
        num_running_reqs=100 + (number * 7 + step) % 150,
        num_waiting_reqs=(number + step) % 20,
        kv_cache_usage=(number * 31 + step) % 1000 / 1000,
        step_counter=step,
        seconds_since_last_step=(number * 13 + step) % 37 / 1000,
    )
    outputs = enginecore_pb.EngineCoreOutputs(engine_index=number, timestamp=float(step))
    outputs.scheduler_stats.CopyFrom(to_message(stats, stats_pb2.SchedulerStats))
    return pb.EngineReport(outputs=outputs)


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the quantile of the values for this fraction. Returns NaN without values."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * fraction), len(ordered) - 1)] if ordered else float("nan")
