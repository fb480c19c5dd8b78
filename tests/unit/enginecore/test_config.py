"""The engine's own configuration."""

import subprocess
import sys

from penstock_enginecore.config import EngineCoreConfig, ModelConfig

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
