"""Prompts that begin alike: a few prefixes of random token ids, each followed by many suffixes, to measure prefix caching.

The idea and the names are those of ``vllm bench serve --dataset-name prefix_repetition``.
"""

import random
from collections.abc import Iterator

from penstock_local.bench.datasets.base import Dataset, Prompt, check_lengths, random_ids
from penstock_local.bench.options import BenchOptions
from penstock_local.rpc.client import ModelInfo


def prefix_repetition(options: BenchOptions, model: ModelInfo) -> Dataset:
    """Every prefix as often as the others. Raises ConfigError when the model cannot take the lengths."""
    prefix, suffix = options.prefix_repetition_prefix_len, options.prefix_repetition_suffix_len
    longest = prefix + suffix + options.prefix_repetition_output_len
    check_lengths(longest, model, flags="--prefix-repetition-prefix-len, -suffix-len or -output-len")
    about = f"{options.prefix_repetition_num_prefixes} prefixes of {prefix} random token ids, suffixes of {suffix}"
    return Dataset(_prompts(options, random_ids(model)), about)


def _prompts(options: BenchOptions, ids: range) -> Iterator[Prompt]:
    """Rounds in which every prefix comes once, each round in an order of its own."""
    rng = random.Random(options.bench_seed)
    length = options.prefix_repetition_prefix_len
    prefixes = [rng.choices(ids, k=length) for _ in range(options.prefix_repetition_num_prefixes)]
    while True:
        rng.shuffle(prefixes)
        for prefix in prefixes:
            suffix = rng.choices(ids, k=options.prefix_repetition_suffix_len)
            yield Prompt(prefix + suffix, options.prefix_repetition_output_len)
