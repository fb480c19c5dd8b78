"""Prompts of random token ids."""

import random
from collections.abc import Iterator

from penstock_local.bench.datasets.base import Dataset, Prompt, check_lengths, random_ids
from penstock_local.bench.datasets.random_images import random_images
from penstock_local.bench.options import BenchOptions
from penstock_local.rpc.client import ModelInfo


def random_dataset(options: BenchOptions, model: ModelInfo) -> Dataset:
    """Prompts and outputs of the lengths asked for, prompts behind the prefix that all share, if there is to be one.

    Raises ConfigError when the model cannot take them.
    """
    longest = options.shared_prefix_len + options.input_range.high + options.output_range.high
    check_lengths(longest, model, flags="--input-len, --output-len or --shared-prefix-len")
    shared = f" behind {options.shared_prefix_len} that all share" if options.shared_prefix_len else ""
    about = f"{options.input_range} random token ids{shared}"
    if options.images:
        width, height = options.image_pixels
        again = f", the same for {options.image_repeat} requests" if options.image_repeat > 1 else ""
        about += f" behind {options.images} images of {width}x{height}{again}"
    return Dataset(_prompts(options, random_ids(model)), about)


def _prompts(options: BenchOptions, ids: range) -> Iterator[Prompt]:
    rng = random.Random(options.bench_seed)
    inputs, outputs = options.input_range, options.output_range
    prefix = rng.choices(ids, k=options.shared_prefix_len)
    images = random_images(options)
    while True:
        length = rng.randint(inputs.low, inputs.high)
        yield Prompt(prefix + rng.choices(ids, k=length), rng.randint(outputs.low, outputs.high), images=next(images))
