"""Settings of single services on the command line of ``penstock serve``."""

import pytest

from penstock_common.errors import ConfigError
from penstock_local.plan import plan
from penstock_local.serve_options import ServeOptions
from penstock_local.settings import parse_settings


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
        ("frontend.server.port=1", "penstock serve decides frontend.server.port itself"),
        ("engine.coordinator.address=x:1", "penstock serve decides engine.coordinator.address itself"),
        ("engine.model.path=x", "penstock serve decides engine.model.path itself"),
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
