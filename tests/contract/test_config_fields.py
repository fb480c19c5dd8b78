"""Every field of every service's configuration refuses what it cannot use, by name."""

import typing
from typing import Any

import msgspec
import pytest

from penstock_common.config.loader import fields, load
from penstock_common.errors import ConfigError
from penstock_coordinator.config import CoordinatorConfig
from penstock_enginecore.config import EngineCoreConfig
from penstock_frontend.config import FrontendConfig

REQUIRED: dict[type[msgspec.Struct], dict[str, str]] = {
    CoordinatorConfig: {},
    EngineCoreConfig: {"model.path": "m"},
    FrontendConfig: {"model.path": "m", "engines": "['127.0.0.1:1']"},
}
LEAVES = [(config, key, leaf) for config in REQUIRED for key, leaf in fields(config)]
IDS = [f"{config.__name__}-{key}" for config, key, _ in LEAVES]
FREE_TEXT = str
"""Any text is a value of these; what it names is looked up later."""


def kinds(leaf: msgspec.structs.FieldInfo) -> set[Any]:
    """The types a field takes, None aside."""

    def flat(annotation: Any) -> typing.Iterator[Any]:
        if typing.get_origin(annotation) is typing.Annotated:
            yield from flat(typing.get_args(annotation)[0])
        elif typing.get_origin(annotation) in (None, tuple, dict, typing.Literal):
            yield annotation
        else:
            for option in typing.get_args(annotation):
                yield from flat(option)

    return {kind for kind in flat(leaf.type) if kind is not type(None)}


def refused(config: type[msgspec.Struct], key: str, value: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(config, overrides=REQUIRED[config] | {key: value}, environ={})
    return str(error.value)


@pytest.mark.parametrize(("config", "key", "leaf"), LEAVES, ids=IDS)
def test_a_value_of_the_wrong_type_is_refused_with_the_fields_name(
    config: type[msgspec.Struct], key: str, leaf: msgspec.structs.FieldInfo
) -> None:
    wrong = "{a: 1}" if FREE_TEXT in kinds(leaf) else "certainly-not"
    message = refused(config, key, wrong)
    assert key in message
    assert wrong in message or "{'a': 1}" in message


NUMBERS = [(c, k, leaf) for c, k, leaf in LEAVES if kinds(leaf) & {int, float}]


@pytest.mark.parametrize(("config", "key", "leaf"), NUMBERS, ids=[f"{c.__name__}-{k}" for c, k, _ in NUMBERS])
def test_a_number_out_of_range_is_refused_with_the_fields_name_and_the_limit(
    config: type[msgspec.Struct], key: str, leaf: msgspec.structs.FieldInfo
) -> None:
    message = refused(config, key, "-7")
    name = key.rsplit(".", 1)[-1]
    assert name in message
    assert "must be" in message or "is not a size" in message


@pytest.mark.parametrize("config", REQUIRED)
def test_a_misspelt_key_is_refused_with_the_nearest_known_one(config: type[msgspec.Struct]) -> None:
    for key, _ in fields(config):
        assert f"did you mean '{key}'" in refused(config, key[:-1] + "_" + key[-1], "1")


@pytest.mark.parametrize(("config", "missing"), [(EngineCoreConfig, "model"), (FrontendConfig, "model")])
def test_a_missing_field_is_named(config: type[msgspec.Struct], missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing} is required"):
        load(config, environ={})
