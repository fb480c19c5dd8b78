"""Settings that have an effect only together with another one."""

from typing import Any

import msgspec
import pytest

from charts.config_schema import STRUCTS
from penstock_common.config.loader import build
from penstock_common.config.setting_dependencies import Need, When, needs_of, unmet_needs
from penstock_common.config.settings import Setting, settings_of
from penstock_common.errors import ConfigError

FRONTEND = {"model": {"path": "m"}, "engines": ["localhost:1"]}
TABLES = {name: {setting.key: setting for setting in settings_of(struct)} for name, struct in STRUCTS.items()}
ROWS = [
    pytest.param(service, key, need, id=f"{service}:{key}:{need.any_of[0].setting}")
    for service, struct in STRUCTS.items()
    for key, needs in needs_of(struct).items()
    for need in needs
]


@pytest.mark.parametrize(("service", "key", "need"), ROWS)
def test_a_setting_without_effect_is_refused_with_the_setting_that_it_needs(service: str, key: str, need: Need) -> None:
    values = defaults(service) | {key: another(TABLES[service][key])}
    for row in needs_of(STRUCTS[service])[key]:  # all other dependencies are met
        when = row.any_of[0]
        values[when.setting] = met(TABLES[service][when.setting], when)
    for when in need.any_of:
        values[when.setting] = unmet(TABLES[service][when.setting], when)
    assert any(need.words in text for text in refusals(service, values, key))


@pytest.mark.parametrize(("service", "key", "need"), ROWS)
def test_any_of_the_conditions_admits_the_setting(service: str, key: str, need: Need) -> None:
    for when in need.any_of:
        values = defaults(service) | {key: another(TABLES[service][key])}
        for row in needs_of(STRUCTS[service])[key]:
            chosen = when if row == need else row.any_of[0]
            values[chosen.setting] = met(TABLES[service][chosen.setting], chosen)
        assert refusals(service, values, key) == []


@pytest.mark.parametrize("service", STRUCTS)
def test_defaults_need_nothing(service: str) -> None:
    assert list(unmet_needs(STRUCTS[service], defaults(service))) == []


@pytest.mark.parametrize("service", STRUCTS)
def test_every_row_names_settings_that_there_are(service: str) -> None:
    table = STRUCTS[service].NEEDS
    for need in table:
        for name in need.settings:
            assert any(key.startswith(name) if name.endswith(".") else key == name for key in TABLES[service]), name
        for when in need.any_of:
            setting = TABLES[service][when.setting]
            assert not setting.kind.choices or set(when.values) <= set(setting.kind.choices), when


def test_loading_a_configuration_refuses_it() -> None:
    with pytest.raises(ConfigError) as refused:
        build(STRUCTS["frontend"], FRONTEND | {"lora": {"scan_interval": 1.0}})
    assert str(refused.value) == (
        "lora.scan_interval is 1.0, which has no effect: it needs lora.directory; set that as well, or leave "
        "lora.scan_interval out"
    )
    build(STRUCTS["frontend"], FRONTEND | {"lora": {"scan_interval": 2.0}})


def test_conditions_are_told_as_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"it needs data_parallel.size to be above 1; set"):
        build(STRUCTS["enginecore"], {"model": {"path": "m"}, "data_parallel": {"move_after": 3.0}})
    with pytest.raises(ConfigError, match=r"it needs speculative.method to be ngram; set"):
        build(STRUCTS["enginecore"], {"model": {"path": "m"}, "speculative": {"prompt_lookup_max": 4}})
    with pytest.raises(ConfigError, match=r"it needs metrics.port to be a port number \(not -1\); set"):
        build(STRUCTS["coordinator"], {"metrics": {"host": "::1"}})


def defaults(service: str) -> dict[str, Any]:
    return {key: setting.default for key, setting in TABLES[service].items()}


def refusals(service: str, values: dict[str, Any], key: str) -> list[str]:
    """Return the refusals that concern one setting."""
    return [text for text in unmet_needs(STRUCTS[service], values) if text.startswith(f"{key} is ")]


def another(setting: Setting) -> Any:
    kind, default = setting.kind, setting.default
    if kind.shape == "mapping":
        return {"a": kind.type()}
    if kind.choices:
        other = next(choice for choice in kind.choices if choice != default)
        return (other,) if kind.shape == "list" else other
    if kind.shape == "list":
        return ("other",)
    if kind.type is bool:
        return not default
    return "other" if kind.type is str else (default or 0) + 1


def unmet(setting: Setting, when: When) -> Any:
    if when.values:
        return next(choice for choice in setting.kind.choices if choice not in when.values)
    if when.off[0] is not None:
        return when.off[0]
    if setting.kind.shape != "one":
        return {} if setting.kind.shape == "mapping" else ()
    return setting.kind.type()


def met(setting: Setting, when: When) -> Any:
    if setting.kind.choices:
        return next(choice for choice in when.values or setting.kind.choices if when.holds(choice))
    if setting.kind.type is bool:
        return True
    return another(msgspec.structs.replace(setting, default=when.off[0]))
