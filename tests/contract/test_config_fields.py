"""Every field of every service's configuration refuses invalid values, and the error names the field."""

import msgspec
import pytest

from penstock_common.config.loader import load
from penstock_common.config.settings import Setting, settings_of
from penstock_common.errors import ConfigError
from penstock_coordinator.config import CoordinatorConfig
from penstock_enginecore.config import EngineCoreConfig
from penstock_frontend.config import FrontendConfig

REQUIRED: dict[type[msgspec.Struct], dict[str, str]] = {
    CoordinatorConfig: {},
    EngineCoreConfig: {"model.path": "m"},
    FrontendConfig: {"model.path": "m", "engines": "['127.0.0.1:1']"},
}
SETTINGS = [(config, setting) for config in REQUIRED for setting in settings_of(config)]
IDS = [f"{config.__name__}-{setting.key}" for config, setting in SETTINGS]


def is_free_text(setting: Setting) -> bool:
    """Return whether the field accepts any text. A name in such a field is looked up later."""
    return setting.kind.type is str and setting.kind.shape != "mapping" and not setting.kind.choices


def refused(config: type[msgspec.Struct], key: str, value: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(config, overrides=REQUIRED[config] | {key: value}, environ={})
    return str(error.value)


@pytest.mark.parametrize(("config", "setting"), SETTINGS, ids=IDS)
def test_a_value_of_the_wrong_type_is_refused_with_the_fields_name(
    config: type[msgspec.Struct], setting: Setting
) -> None:
    wrong = "{a: 1}" if is_free_text(setting) else "certainly-not"
    message = refused(config, setting.key, wrong)
    assert setting.key in message
    assert wrong in message or "{'a': 1}" in message


NUMBERS = [(c, s) for c, s in SETTINGS if s.kind.type in (int, float) and s.kind.shape == "one"]


@pytest.mark.parametrize(("config", "setting"), NUMBERS, ids=[f"{c.__name__}-{s.key}" for c, s in NUMBERS])
def test_a_number_out_of_range_is_refused_with_the_fields_name_and_the_limit(
    config: type[msgspec.Struct], setting: Setting
) -> None:
    message = refused(config, setting.key, "-7")
    assert setting.key in message
    assert f"it must be {setting.kind.range}" in message or "is not a size" in message


@pytest.mark.parametrize(("config", "setting"), SETTINGS, ids=IDS)
def test_every_setting_says_what_it_means(config: type[msgspec.Struct], setting: Setting) -> None:
    assert setting.kind.description.endswith("."), "write Annotated[..., Meta(description=...)]: a sentence, with units"


@pytest.mark.parametrize(("config", "setting"), SETTINGS, ids=IDS)
def test_a_default_is_in_the_settings_own_range(config: type[msgspec.Struct], setting: Setting) -> None:
    assert setting.required or setting.kind.refusal(setting.key, setting.default) == ""


@pytest.mark.parametrize("config", REQUIRED)
def test_a_misspelt_key_is_refused_with_the_nearest_known_one(config: type[msgspec.Struct]) -> None:
    for key in (setting.key for setting in settings_of(config)):
        assert f"did you mean '{key}'" in refused(config, key[:-1] + "_" + key[-1], "1")


@pytest.mark.parametrize(("config", "missing"), [(EngineCoreConfig, "model"), (FrontendConfig, "model")])
def test_a_missing_field_is_named(config: type[msgspec.Struct], missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing} is required"):
        load(config, environ={})
