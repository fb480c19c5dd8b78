"""Flags without effect in combination with others are refused, with both names."""

import pytest

from penstock_common.errors import ConfigError
from penstock_local.batch.options import BatchOptions
from penstock_local.bench.options import BenchOptions
from penstock_local.commands.status import StatusOptions

STATUS = {"admin_address": "localhost:1", "address": "localhost:2"}
BATCH = {"input": "in.jsonl", "output": "out.jsonl", "model": "m"}


@pytest.mark.parametrize("once", ["once", "json"])
def test_an_interval_of_a_status_that_is_shown_once_is_refused(once: str) -> None:
    with pytest.raises(ConfigError, match=rf"--interval has no effect with --{once}; leave one of them out"):
        StatusOptions(**STATUS, interval=2.0, **{once: True})
    StatusOptions(**STATUS, interval=1.0, **{once: True})
    StatusOptions(**STATUS, interval=2.0)


def test_errors_of_a_batch_that_begins_anew_are_not_there_to_be_retried() -> None:
    with pytest.raises(ConfigError, match=r"--retry-errors has no effect with --overwrite"):
        BatchOptions(**BATCH, retry_errors=True, overwrite=True)
    BatchOptions(**BATCH, retry_errors=True)


def test_json_ends_where_it_is_complete_whatever_the_flag_says() -> None:
    with pytest.raises(ConfigError, match=r"--end-at-eos is for --dataset random and sharegpt and prefix-repetition"):
        BenchOptions(address="localhost:1", dataset="json-schema", end_at_eos=True)
    BenchOptions(address="localhost:1", end_at_eos=True)
