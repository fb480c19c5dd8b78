"""The dataset that the options name."""

from penstock_local.bench.datasets.base import CountTokens, Dataset
from penstock_local.bench.options import BenchOptions
from penstock_local.rpc.client import ModelInfo


async def make_dataset(options: BenchOptions, model: ModelInfo, count_tokens: CountTokens) -> Dataset:
    """Raises ConfigError when a file or lengths cannot be right, and what the server fails to count tokens with."""
    if options.prompts:
        from penstock_local.bench.datasets.prompts_file import prompts_file

        return prompts_file(options)
    if options.dataset == "sharegpt":
        from penstock_local.bench.datasets.sharegpt import sharegpt

        return await sharegpt(options, model, count_tokens)
    if options.dataset == "prefix-repetition":
        from penstock_local.bench.datasets.prefix_repetition import prefix_repetition

        return prefix_repetition(options, model)
    if options.dataset == "json-schema":
        from penstock_local.bench.datasets.json_schema import json_schema

        return json_schema(options)
    from penstock_local.bench.datasets.random import random_dataset

    return random_dataset(options, model)
