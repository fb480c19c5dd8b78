"""The engine's own configuration."""

import subprocess
import sys

import pytest

from penstock_common.errors import ConfigError
from penstock_enginecore.config import CoordinatorClientConfig, EngineCoreConfig, ModelConfig

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
