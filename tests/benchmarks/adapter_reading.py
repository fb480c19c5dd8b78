"""Time to read an adapter from the page cache: ``python -m tests.benchmarks.adapter_reading MODEL ADAPTER``."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock_enginecore.lora.peft_adapter import LoraLimits, read_adapter
from penstock_enginecore.lora.target import AdapterTarget


def measure(model: Path, adapter: Path, rounds: int) -> dict[str, float]:
    """Return the milliseconds of one read on one thread (elapsed time and processor time), and the adapter's size."""
    torch.set_num_threads(1)
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        skeleton = make.from_config(AutoConfig.from_pretrained(model))
    target, limits = AdapterTarget.of(skeleton), LoraLimits(256)
    read = read_adapter(adapter, target, limits)
    times, busy = [], []
    for _ in range(rounds):
        began, computed = time.perf_counter(), time.thread_time()
        read_adapter(adapter, target, limits)
        times.append(1000 * (time.perf_counter() - began))
        busy.append(1000 * (time.thread_time() - computed))
    return {
        "rank": read.max_rank,
        "layers": len(read.updates),
        "megabytes": read.num_bytes / 1e6,
        "median_ms": statistics.median(times),
        "least_ms": min(times),
        "largest_ms": max(times),
        "median_cpu_ms": statistics.median(busy),
    }


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description="Measure how long reading an adapter takes.")
    parser.add_argument("model", type=Path, help="folder of the base model")
    parser.add_argument("adapter", type=Path, help="folder of the adapter, see examples/demo_model/make_adapters.py")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    found = measure(options.model, options.adapter, options.rounds)
    sys.stdout.write(json.dumps({name: round(value, 2) for name, value in found.items()}) + "\n")


if __name__ == "__main__":
    main()
