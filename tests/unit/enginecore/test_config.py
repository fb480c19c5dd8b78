"""The engine's own configuration."""

import subprocess
import sys

import pytest

from penstock_common.errors import ConfigError
from penstock_enginecore.config import (
    CoordinatorClientConfig,
    DataParallelConfig,
    EngineCoreConfig,
    ExecutorConfig,
    ModelConfig,
    SchedulerConfig,
)

PRINT_NAME = """
import os
os.getpid = lambda: 1  # as in every container
from penstock_enginecore.config import EngineCoreConfig, ModelConfig
print(EngineCoreConfig(model=ModelConfig(path="m")).name)
"""


def name(**config):
    return EngineCoreConfig(model=ModelConfig(path="m"), **config).name


def test_a_configured_id_is_the_engines_name():
    assert name(engine_id="engine-7") == "engine-7"


def test_the_name_stays_the_same_within_a_process():
    assert name() == name()


def test_two_processes_of_one_host_name_and_process_id_have_different_names():
    names = {
        subprocess.run([sys.executable, "-c", PRINT_NAME], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(names) == 2


@pytest.mark.parametrize(
    "advertise", ["10.0.0.7", "10.0.0.7:50052", "fd00::7", "[fd00::7]", "[fd00::7]:50052", "engine-0"]
)
def test_an_engine_is_reached_under_a_host_with_or_without_a_port(advertise):
    assert CoordinatorClientConfig(advertise=advertise).advertise == advertise


@pytest.mark.parametrize(
    "advertise", ["engine:", "engine:0", "engine:65536", "http://engine:1", "[engine]:1", "[fd00::7]:x"]
)
def test_an_address_that_nobody_could_connect_to_is_refused_at_the_start(advertise):
    with pytest.raises(ConfigError) as refused:
        CoordinatorClientConfig(advertise=advertise)
    assert f"coordinator.advertise is {advertise!r}; it must " in str(refused.value)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"executor": ExecutorConfig(tensor_parallel_size=2)}, r"executor\.tensor_parallel_size 2"),
        ({"executor": ExecutorConfig(pipeline_parallel_size=2)}, r"executor\.pipeline_parallel_size 2"),
        ({"executor": ExecutorConfig(max_concurrent_batches=2)}, r"executor\.max_concurrent_batches 2"),
        ({"scheduler": SchedulerConfig(async_scheduling=True)}, r"scheduler\.async_scheduling true"),
        ({"coordinator": CoordinatorClientConfig()}, r"coordinator\.address empty"),
    ],
)
def test_a_rank_of_a_group_is_told_what_it_cannot_do(config, problem):
    with pytest.raises(ConfigError, match=rf"data_parallel\.size is 2 and {problem}"):
        name(
            data_parallel=DataParallelConfig(size=2), **{"coordinator": CoordinatorClientConfig(address="c:1")} | config
        )


def test_a_group_goes_on_with_no_more_ranks_than_it_begins_with():
    with pytest.raises(ConfigError, match=r"data_parallel\.min_size is 3; it must not exceed data_parallel\.size = 2"):
        DataParallelConfig(size=2, min_size=3)


def test_ranks_are_reached_at_an_ip_address():
    with pytest.raises(ConfigError, match=r"data_parallel\.address is 'engine-0'; it must be an IP address"):
        DataParallelConfig(address="engine-0")
