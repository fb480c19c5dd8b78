"""The engine's own configuration."""

import subprocess
import sys

import pytest

from penstock_common.config.loader import load
from penstock_common.errors import ConfigError
from penstock_enginecore.config import (
    CoordinatorClientConfig,
    DataParallelConfig,
    EngineCoreConfig,
    ExecutorConfig,
    ModelConfig,
    ParallelConfig,
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
        ({"executor": ExecutorConfig(tensor_parallel_size=2)}, r"executor\.tensor_parallel_size is 2"),
        ({"executor": ExecutorConfig(pipeline_parallel_size=2)}, r"executor\.pipeline_parallel_size is 2"),
        ({"executor": ExecutorConfig(max_concurrent_batches=2)}, r"executor\.max_concurrent_batches is 2"),
        ({"scheduler": SchedulerConfig(async_scheduling=True)}, r"scheduler\.async_scheduling is true"),
        ({"coordinator": CoordinatorClientConfig()}, r"coordinator\.address is empty"),
    ],
)
def test_a_rank_of_a_group_is_told_what_it_cannot_do(config, problem):
    with pytest.raises(ConfigError, match=rf"data_parallel\.size is 2(,)? (and|but) {problem}"):
        name(
            data_parallel=DataParallelConfig(size=2), **{"coordinator": CoordinatorClientConfig(address="c:1")} | config
        )


def test_a_group_goes_on_with_no_more_ranks_than_it_begins_with():
    with pytest.raises(
        ConfigError, match=r"data_parallel\.min_size is 3; it must be at most data_parallel\.size, which is 2"
    ):
        DataParallelConfig(size=2, min_size=3)


def test_ranks_that_other_hosts_reach_need_a_secret():
    coordinator = CoordinatorClientConfig(address="c:1")
    with pytest.raises(
        ConfigError, match=r"data_parallel\.address is '10\.0\.0\.1', .* parallel\.secret_file is empty"
    ):
        name(data_parallel=DataParallelConfig(size=2, address="10.0.0.1"), coordinator=coordinator)
    name(data_parallel=DataParallelConfig(size=2, address="127.0.0.2"), coordinator=coordinator)
    secret = ParallelConfig(secret_file="/etc/secret")
    name(data_parallel=DataParallelConfig(size=2, address="10.0.0.1"), coordinator=coordinator, parallel=secret)


def test_ranks_are_reached_at_an_ip_address():
    with pytest.raises(ConfigError, match=r"data_parallel\.address is 'engine-0'; it must be an IP address"):
        DataParallelConfig(address="engine-0")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"role": "encode"}, "role is 'encode'; known: both, prefill, decode"),
        (
            {"kv_transfer.transport": "rdma"},
            "kv_transfer.transport is 'rdma'; known: auto, grpc, shared_memory, nixl, off",
        ),
        ({"kv_transfer.port": "65536"}, "kv_transfer.port is 65536; it must be from 0 to 65535"),
        ({"kv_transfer.lease": "0.01"}, "kv_transfer.lease is 0.01; it must be from 0.05 to 3600"),
        ({"kv_transfer.lease": "nan"}, "kv_transfer.lease is nan"),
        (
            {"kv_transfer.max_lease": "1"},
            "kv_transfer.max_lease is 1; it must be at least kv_transfer.lease, which is 5",
        ),
        (
            {"kv_transfer.max_leased_fraction": "1.5"},
            "kv_transfer.max_leased_fraction is 1.5; it must be from 0 to 1",
        ),
        ({"kv_transfer.silence": "61"}, "kv_transfer.silence is 61; it must be from 0.05 to 60"),
        ({"kv_transfer.arena": "1KiB"}, "kv_transfer.arena is 1024; it must be at least 1MiB"),
        ({"kv_transfer.advertise": "engine:0"}, "kv_transfer.advertise is 'engine:0'; it must be host:port"),
        ({"kv_transfer.advertise": "fd00::7:x"}, "kv_transfer.advertise is 'fd00::7:x'; it must"),
        (
            {"kv_transfer.allowed_addresses": "[a, 'b:0']"},
            "kv_transfer.allowed_addresses[1] is 'b:0'; it must be host:port",
        ),
        (
            {"kv_transfer.allowed_addresses": "[10.0.0.1/8]"},
            "kv_transfer.allowed_addresses[0] is '10.0.0.1/8'; it is not a valid IP network",
        ),
        (
            {"kv_transfer.transport": "grpc", "cache.enable_prefix_caching": "false"},
            "kv_transfer.transport is 'grpc', but cache.enable_prefix_caching is false",
        ),
        (
            {"kv_transfer.connector": "ours", "kv_transfer.transport": "grpc"},
            "kv_transfer.connector is 'ours' and kv_transfer.transport is 'grpc'; only one of them can load blocks",
        ),
        (
            {"kv_transfer.connector": "ours", "cache.host_memory": "1MiB"},
            "kv_transfer.connector is 'ours' and cache.host_memory is 1048576; only one of them can load blocks",
        ),
        (
            {"kv_transfer.connector": "ours", "cache.enable_prefix_caching": "false"},
            "kv_transfer.connector is 'ours', but cache.enable_prefix_caching is false",
        ),
        (
            {"cache.host_memory": "1MiB", "cache.enable_prefix_caching": "false"},
            "cache.host_memory is 1048576, but cache.enable_prefix_caching is false",
        ),
        ({"cache.host_memory": "much"}, "cache.host_memory: 'much' is not a size"),
        ({"cache.host_memory": "-1"}, "cache.host_memory: '-1' is not a size"),
        ({"cache.disk": "/kv", "cache.disk_size": "1MiB"}, "cache.disk is '/kv', but cache.host_memory is 0"),
        ({"cache.disk": "/kv", "cache.host_memory": "1MiB"}, "cache.disk is '/kv' and cache.disk_size is 0"),
        ({"cache.disk_size": "1MiB", "cache.host_memory": "1MiB"}, "cache.disk is '' and cache.disk_size is 1048576"),
        ({"cache.min_load_tokens": "0"}, "cache.min_load_tokens is 0; it must be at least 1"),
    ],
    ids=lambda given: "" if isinstance(given, str) else ", ".join(given),
)
def test_settings_of_blocks_that_cannot_be_are_named_with_their_values(settings, message):
    with pytest.raises(ConfigError) as refused:
        load(EngineCoreConfig, overrides={"model.path": "m", **settings}, environ={})
    assert message in str(refused.value)


@pytest.mark.parametrize(("given", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_names_of_types_that_vllm_has_are_those_of_torch(given, dtype):
    assert ModelConfig(path="m", dtype=given).dtype == dtype
