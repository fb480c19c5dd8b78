"""Packages that extend an engine through entry points."""

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from penstock_common.errors import ConfigError
from penstock_enginecore import plugins
from penstock_enginecore.attention import factory as attention
from penstock_enginecore.core import utility
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.scheduler import base as scheduler
from penstock_enginecore.executor import factory
from penstock_enginecore.kv_transfer.core import registry
from tests.fakes.engines.engine_harness import OtherScheduler, make_config, make_engine

HERE = __name__
called: list[str] = []


def first() -> None:
    called.append("first")


def second() -> None:
    called.append("second")


def broken() -> None:
    raise RuntimeError("no licence")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint(name, f"{HERE}:{target}", plugins.GROUP)
        for name, target in {"b": "second", "a": "first", "bad": "broken", "gone": "nothing"}.items()
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: [p for p in points if p.group == group])
    called.clear()


def test_the_plugins_that_are_named_are_called_in_their_order() -> None:
    assert plugins.load_plugins(["b", "a"]) == ["b", "a"]
    assert called == ["second", "first"]
    assert plugins.load_plugins([]) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("c", "'c' is not installed; installed: a, b, bad, gone"),
        ("bad", "'bad' .* failed: RuntimeError: no licence"),
        ("gone", "'gone' .* failed: AttributeError"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_stops_the_start(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plugins.load_plugins([name])


def test_all_installed_plugins_are_loaded_when_none_is_named() -> None:
    with pytest.raises(ConfigError, match="'bad'"):
        plugins.load_plugins(None)
    assert called == ["first", "second"]


def test_a_plugin_can_add_each_kind_of_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_KNOWN", dict(scheduler._KNOWN))
    monkeypatch.setattr(factory, "_KNOWN", dict(factory._KNOWN))
    monkeypatch.setattr(registry, "_KNOWN", {})
    monkeypatch.setattr(attention, "_FACTORIES", dict(attention._FACTORIES))
    monkeypatch.setattr(utility, "_ADDED", {"engine": {}, "worker": {}})

    def num_blocks(control: EngineControl, factor: int) -> int:
        return control._engine.kv_cache_config.num_blocks * factor

    made: list[Any] = []
    scheduler.register_scheduler("mine", "tests.fakes.engines.engine_harness:OtherScheduler")
    factory.register_executor("mine", f"{HERE}:made_executor")
    attention.register_backend("mine", lambda: made)  # type: ignore[arg-type, return-value]
    utility.register_utility("num_blocks", num_blocks)
    registry.register_kv_connector("mine", "tests.fakes.engines.shared_store:StoreConnector")
    engine = make_engine(num_blocks=20, scheduler="mine")
    assert isinstance(engine.scheduler, OtherScheduler)
    assert EngineControl(engine).utilities.invoke("num_blocks", [2]) == 40
    assert attention.create_backend("mine", attention.torch.device("cpu")) is made
    assert factory.make_executor(make_config(kind="mine")) == "an executor"
    assert registry._KNOWN == {"mine": "tests.fakes.engines.shared_store:StoreConnector"}
    with pytest.raises(ValueError, match="already registered"):
        utility.register_utility("num_blocks", num_blocks)


def made_executor(config: Any) -> str:
    return "an executor"


def test_an_executor_that_is_not_known_is_named() -> None:
    with pytest.raises(
        ConfigError, match="executor.kind is 'uniproz'; known: auto, uniproc, multiproc; did you mean 'uniproc'"
    ):
        factory.make_executor(make_config(kind="uniproz"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        factory.make_executor(make_config(kind="no.such:Thing"))
