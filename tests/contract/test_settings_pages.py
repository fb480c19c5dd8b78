"""Files that are generated from the services' settings match the current settings."""

from pathlib import Path

import pytest

from charts.settings import PAGE, ROOT, generated
from penstock_common.config.setting_dependencies import needs_of
from penstock_common.config.settings import settings_of
from penstock_coordinator.config import CoordinatorConfig
from penstock_enginecore.config import EngineCoreConfig
from penstock_frontend.config import FrontendConfig

GENERATED = generated()


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_generated_file_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == GENERATED[path], "it is stale; run: make settings"


@pytest.mark.parametrize("config", [FrontendConfig, EngineCoreConfig, CoordinatorConfig])
def test_the_page_of_settings_has_each_of_them_once_with_its_range_and_meaning(config: type) -> None:
    heading = {FrontendConfig: "Frontend", EngineCoreConfig: "Engine", CoordinatorConfig: "Coordinator"}[config]
    part = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    needs = needs_of(config)
    for setting in settings_of(config):
        (row,) = [line for line in part.splitlines() if line.startswith(f"| `{setting.key}` |")]
        assert setting.kind.range in row
        needed = "".join(f" Needs {need.words}." for need in needs.get(setting.key, ()))
        assert row.endswith(f"| {setting.kind.description}{needed} |")
