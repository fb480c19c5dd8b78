"""Configuration of a frontend with several models."""

from typing import Any

import pytest

from penstock_common.config.loader import build, load
from penstock_common.errors import ConfigError
from penstock_frontend.config import FrontendConfig

FIRST: dict[str, Any] = {"model": {"path": "/m/a", "aliases": {"x": ""}}, "engines": ["h:1"], "frontend_id": "f"}


def config(*models: Any, **changes: Any) -> FrontendConfig:
    return build(FrontendConfig, FIRST | {"models": list(models)} | changes)


def test_each_model_has_a_configuration_of_its_own() -> None:
    lora = {"adapters": {"p": "/p"}}
    one, two = config({"model": {"path": "/m/b"}, "engines": ["h:2"], "lora": lora}).per_model()
    assert (one.model.name, one.engines, one.name, one.lora.serves, one.models) == ("a", ("h:1",), "f", False, ())
    assert (two.model.name, two.engines, two.name, two.lora.serves, two.models) == ("b", ("h:2",), "f/b", True, ())
    assert [each.model.name for each in config().per_model()] == ["a"]


def test_with_a_coordinator_each_model_has_pools() -> None:
    coordinator = {"address": "c:1", "pools": ["large"]}
    entry = {"model": {"path": "/m/b"}, "pools": ["small"]}
    one, two = config(entry, engines=[], coordinator=coordinator).per_model()
    assert (one.coordinator.pools, two.coordinator.pools, two.coordinator.address) == (("large",), ("small",), "c:1")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"model": {"path": "/m/a"}, "engines": ["h:2"]},
            "'a' is used twice: by the name of the model in model, and by",
        ),
        ({"model": {"path": "/x"}, "engines": ["h:2"]}, "'x' is used twice: by model.aliases, and by the name of the"),
        (
            {"model": {"path": "/b"}, "engines": ["h:2"], "lora": {"adapters": {"x": "/p"}}},
            r"'x' is used twice: by model.aliases, and by models\[0\].lora.adapters",
        ),
        ({"model": {"path": "/b"}}, r"models\[0\]: coordinator.address or engines is required"),
        ({"model": {"path": "/b"}, "engines": ["h"]}, r"models\[0\]: engines: 'h' must be host:port"),
        (
            {"model": {"path": "/b", "aliases": {"b": ""}}, "engines": ["h:2"]},
            r"models\[0\]: model.aliases: 'b' is the",
        ),
        ({"engines": ["h:2"]}, r"models\[0\].model is required"),
        ({"model": {"path": "/b", "tool_parser": 3}}, r"models\[0\].model.tool_parser is 3; it must be a string"),
        ({"model": {"path": "/b", "tool": ""}}, r"there is no setting 'models\[0\].model.tool'"),
        (3, r"'models\[0\]' must be a mapping, not 3"),
    ],
)
def test_an_entry_that_cannot_be_served_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(entry)


def test_engines_of_a_model_are_refused_beside_a_coordinator() -> None:
    entry = {"model": {"path": "/b"}, "engines": ["h:2"]}
    with pytest.raises(ConfigError, match=r"models\[0\].engines is set, but coordinator.address is set too; use"):
        config(entry, engines=[], coordinator={"address": "c:1"})


def test_too_many_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="models has 16 entries; the maximum is 15"):
        config(*({"model": {"path": f"/m/{n}"}, "engines": ["h:2"]} for n in range(16)))


def test_models_can_be_given_as_a_flag() -> None:
    text = "[{model: {path: /m/b}, engines: ['h:2']}]"
    flags = {"model.path": "/m/a", "engines": "['h:1']", "models": text}
    assert load(FrontendConfig, overrides=flags, environ={}).models[0].model.name == "b"
