"""Prompts with equal beginnings."""

import itertools
from collections import Counter

import pytest

from penstock_client import Model
from penstock_common.errors import ConfigError
from penstock_local.bench.dataset import prefix_repetition
from penstock_local.bench.options import BenchOptions

MODEL = Model(name="m", max_model_len=512, num_engines=1, vocab_size=300)
LENGTHS = {"prefix_repetition_prefix_len": 8, "prefix_repetition_suffix_len": 3, "prefix_repetition_output_len": 5}


def test_every_prefix_comes_as_often_each_time_with_another_suffix() -> None:
    options = BenchOptions(address="x", dataset="prefix-repetition", prefix_repetition_num_prefixes=4, **LENGTHS)
    prompts = list(itertools.islice(prefix_repetition(options, MODEL).prompts, 20))
    assert {(len(prompt.text), prompt.max_tokens) for prompt in prompts} == {(11, 5)}
    assert list(Counter(tuple(prompt.text[:8]) for prompt in prompts).values()) == [5, 5, 5, 5]
    assert len({tuple(prompt.text[8:]) for prompt in prompts}) == 20


def test_lengths_that_the_model_cannot_take_are_refused() -> None:
    options = BenchOptions(address="x", dataset="prefix-repetition")
    with pytest.raises(
        ConfigError, match="up to 640 tokens together, but m accepts at most 512; lower --prefix-repetition-prefix-len"
    ):
        prefix_repetition(options, MODEL)
