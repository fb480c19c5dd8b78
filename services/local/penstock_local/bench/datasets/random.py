"""Prompts of random token ids."""

import random
from collections.abc import Iterator

from penstock_local.bench.datasets.base import Dataset, Prompt, check_lengths, random_ids
from penstock_local.bench.options import BenchOptions
from penstock_local.rpc.client import ModelInfo


def random_dataset(options: BenchOptions, model: ModelInfo) -> Dataset:
    """Prompts and outputs of the lengths asked for, prompts behind the prefix that all share, if there is to be one.

    Raises ConfigError when the model cannot take them.
    """
    longest = options.shared_prefix_len + options.input_range.high + options.output_range.high
    check_lengths(longest, model, flags="--input-len, --output-len or --shared-prefix-len")
    shared = f" behind {options.shared_prefix_len} that all share" if options.shared_prefix_len else ""
    return Dataset(_prompts(options, random_ids(model)), f"{options.input_range} random token ids{shared}")


def _prompts(options: BenchOptions, ids: range) -> Iterator[Prompt]:
    rng = random.Random(options.bench_seed)
    inputs, outputs = options.input_range, options.output_range
    prefix = rng.choices(ids, k=options.shared_prefix_len)
    while True:
        length = rng.randint(inputs.low, inputs.high)
        yield Prompt(prefix + rng.choices(ids, k=length), rng.randint(outputs.low, outputs.high))
