"""Settings that can change at run time: the list of them, and the differences between two configurations."""

import msgspec
import pytest

from penstock_common.config.sections import LogConfig, MetricsConfig
from penstock_common.config.settings import differences, is_reread, reread_sections, sections_of, struct_in, with_reread
from penstock_coordinator.config import CoordinatorConfig
from penstock_frontend.config import FairnessConfig, FrontendConfig, LimitsConfig, ModelConfig

BEFORE = FrontendConfig(model=ModelConfig(path="m"), engines=("e:1",))
AFTER = FrontendConfig(
    model=ModelConfig(path="m"),
    engines=("e:1", "e:2"),
    metrics=MetricsConfig(port=9100),
    limits=LimitsConfig(max_n=7),
    fairness=FairnessConfig(weights={"gold": 2.0}),
    log=LogConfig(level="debug"),
)


def test_differences_are_told_by_their_keys_with_the_new_values() -> None:
    assert differences(BEFORE, BEFORE) == {}
    assert differences(BEFORE, AFTER) == {
        "engines": ("e:1", "e:2"),
        "metrics.port": 9100,
        "limits.max_n": 7,
        "fairness.weights": {"gold": 2.0},
        "log.level": "debug",
    }


def test_what_is_read_anew_is_taken_and_the_rest_stays() -> None:
    running = with_reread(BEFORE, AFTER)
    assert (running.limits, running.fairness, running.log) == (AFTER.limits, AFTER.fairness, AFTER.log)
    assert list(differences(running, AFTER)) == ["engines", "metrics.port"]


def test_sections_that_are_read_anew_say_so_where_settings_are_explained() -> None:
    assert reread_sections(FrontendConfig) == ("limits", "fairness", "log")
    assert reread_sections(CoordinatorConfig) == ("log",)
    told = {section.key for section in sections_of(FrontendConfig) if "running service reloads" in section.description}
    assert told == {"limits", "fairness", "log"}


@pytest.mark.parametrize("config_type", [FrontendConfig, CoordinatorConfig])
def test_nothing_but_sections_at_the_top_is_marked(config_type: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(config_type):
        section = struct_in(field.type)
        assert section is not None or not is_reread(field.type), field.name
        if section is not None:
            assert not any(is_reread(inner.type) for inner in msgspec.structs.fields(section)), field.name
