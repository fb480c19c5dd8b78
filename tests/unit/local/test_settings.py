"""Settings of single services on the command line of ``penstock serve``."""

import pytest

from penstock_common.errors import ConfigError
from penstock_local.serving.machine_resources import check_host
from penstock_local.serving.plan import check_configs, num_internal_ports, plan
from penstock_local.serving.serve_options import ServeOptions
from penstock_local.settings import check_parsers, of_environment, parse_settings


def test_values_are_yaml_and_belong_to_a_service() -> None:
    assert parse_settings(
        ["engine.scheduler.policy=priority", "engine.scheduler.max-num-seqs=8", "frontend.log.requests=true"]
    ) == {
        "engine": {"scheduler.policy": "priority", "scheduler.max_num_seqs": 8},
        "frontend": {"log.requests": True},
    }


def test_every_engine_gets_them_beside_what_the_command_sets() -> None:
    settings = parse_settings(["engine.cache.enable_kv_events=true", "engine.model.task=embed"])
    options = ServeOptions(model="org/name", engines=2, max_model_len=64, settings=settings)
    _, *engines, frontend = plan(options, internal_ports=[1, 2, 3], cores=4)
    for engine in engines:
        assert engine.config["cache"]["enable_kv_events"] is True
        assert engine.config["model"]["task"] == "embed"
        assert engine.config["model"]["max_model_len"] == 64
    assert "cache" not in frontend.config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine.scheduler.policy", "write SERVICE.KEY=VALUE"),
        ("engine=1", "write SERVICE.KEY=VALUE"),
        ("engin.scheduler.policy=fcfs", "no such service 'engin'.*did you mean 'engine'"),
        ("engine.scheduler.polic=fcfs", "engine has no key 'scheduler.polic'; did you mean 'scheduler.policy'"),
        ("frontend.server.port=1", "penstock serve sets frontend.server.port itself"),
        ("engine.coordinator.address=x:1", "penstock serve sets engine.coordinator.address itself"),
        ("engine.model.path=x", "penstock serve sets engine.model.path itself"),
        ("engine.plugins=[", "the value cannot be read"),
    ],
)
def test_what_cannot_be_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings([text])


@pytest.mark.parametrize("key", ["coordinator.wedged_after", "frontend.detection.wedged_after"])
def test_a_key_that_was_removed_is_refused_with_what_is_there_instead(key: str) -> None:
    with pytest.raises(ConfigError, match="it was removed; set wedged_after of the engines"):
        parse_settings([f"{key}=30"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine.scheduler.max_num_seqs=-1", "engine: scheduler.max_num_seqs is -1; it must be from 1 to 65536"),
        ("engine.scheduler.policy=foo", "engine: scheduler.policy is 'foo'; known: fcfs, priority"),
        ("frontend.limits.max_n=abc", "frontend: limits.max_n is 'abc'"),
        ("coordinator.scaling.target_load=x", "coordinator: scaling.target_load is 'x'"),
    ],
)
def test_settings_that_services_would_refuse_are_refused_before_any_starts(text: str, message: str) -> None:
    options = ServeOptions(model="org/name", engines=2, settings=parse_settings([text]))
    specs = plan(options, internal_ports=[1, 2, 3], cores=4)
    with pytest.raises(ConfigError, match=message):
        check_configs(specs)


def test_what_the_command_tells_its_services_is_taken() -> None:
    for fields in ({}, {"frontends": 2}, {"prefill_engines": 1, "decode_engines": 1}, {"tensor_parallel_size": 2}):
        options = ServeOptions(model="org/name", **fields)
        check_configs(plan(options, internal_ports=[1, 2, 3, 4, 5][: num_internal_ports(options)], cores=4))


def test_names_of_parsers_are_known_before_the_start() -> None:
    check_parsers({"model.tool_parser": "hermes", "model.reasoning_parser": "auto"})
    with pytest.raises(ConfigError, match="frontend: model.tool_parser is 'herme'"):
        check_parsers({"model.tool_parser": "herme"})


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("PENSTOCK_SCHEDULER__POLICY", "engine.scheduler.policy"),
        ("PENSTOCK_LOG__REQUESTS", "coordinator.log.requests or engine.log.requests or frontend.log.requests"),
        ("PENSTOCK_NOTHING", ""),
        ("PENSTOCK_SERVER__PORT", ""),
    ],
)
def test_variables_of_services_have_settings(name: str, setting: str) -> None:
    assert of_environment(name) == setting


def test_a_host_that_is_not_here_is_refused() -> None:
    check_host("127.0.0.1")
    check_host("0.0.0.0")
    for host in ("999.1.1.1", "192.0.2.1"):
        with pytest.raises(ConfigError, match=f"--host is '{host}', but nothing can listen on it"):
            check_host(host)
