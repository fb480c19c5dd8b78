"""The services can read the config files that the chart writes."""

import importlib
import inspect
import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

from charts import lint, values_table
from charts.config_schema import NOT_OFFERED, SET_BY_CHART, STRUCTS
from penstock_common.config.loader import from_command_line
from penstock_common.config.sections import TracingConfig
from penstock_common.config.settings import settings_of
from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig
from penstock_frontend.config import FrontendConfig
from tests.chart.rendering import DEMO, HUB, SERVICES, VALUE_SETS, load, release, service_of


@pytest.mark.parametrize("name", sorted(VALUE_SETS))
def test_every_rendered_config_loads(name: str, tmp_path: Path):
    rendered = release(name)
    for component in rendered.components():
        assert isinstance(load(rendered, component, tmp_path), STRUCTS[service_of(component)])


@pytest.mark.parametrize("component", SERVICES)
def test_traces_go_to_the_collector_under_the_releases_name(component: str, tmp_path: Path):
    settings = ("tracing.endpoint=collector.monitoring.svc:4317", "tracing.sampleRatio=0")
    tracing = load(release(HUB, *settings), component, tmp_path).tracing
    assert (tracing.endpoint, tracing.sample_ratio) == ("collector.monitoring.svc:4317", 0)
    assert tracing.service_name.endswith(f"-{component}")


@pytest.mark.parametrize("component", SERVICES)
def test_without_a_collector_there_are_no_traces(component: str, tmp_path: Path):
    assert load(release(HUB), component, tmp_path).tracing == TracingConfig()


@pytest.mark.parametrize("collected", [True, False])
def test_the_engines_load_is_told_by_them_or_by_the_frontends(collected: bool, tmp_path: Path):
    rendered = release(HUB, f"metrics.enabled={str(collected).lower()}")
    frontend, engine = (load(rendered, component, tmp_path) for component in ("frontend", "enginecore"))
    assert isinstance(frontend, FrontendConfig)
    assert isinstance(engine, EngineCoreConfig)
    assert (frontend.http.engine_metrics, engine.metrics.port >= 0) == (not collected, collected)


def test_engines_and_frontends_agree_on_the_model_and_meet_at_the_coordinator(tmp_path: Path):
    engine, frontend = (load(release(HUB), c, tmp_path) for c in ("enginecore", "frontend"))
    assert isinstance(engine, EngineCoreConfig)
    assert isinstance(frontend, FrontendConfig)
    assert engine.model.name == frontend.model.name == "model-1b"
    service = release(HUB).one("Service", "coordinator")
    address = f"{service['metadata']['name']}.serving.svc:{service['spec']['ports'][0]['port']}"
    assert engine.coordinator.address == frontend.coordinator.address == address


@pytest.mark.parametrize("component", SERVICES)
def test_values_offer_each_setting_of_the_service_and_no_other(component: str):
    schema = json.loads((lint.CHART / "values.schema.json").read_text())
    part = schema["properties"][component]["properties"]["config"]
    offered = {".".join(path) for path in values_table.leaves(schema, part)}
    known = {setting.key for setting in settings_of(STRUCTS[component])}
    assert offered - known == set(), "values.schema.json offers settings that the service does not have"
    missing = known - offered - SET_BY_CHART - NOT_OFFERED[component]
    assert missing == set(), f"values.schema.json lacks settings of the service; add them under {component}.config"


@pytest.mark.parametrize("component", SERVICES)
def test_the_services_own_defaults_are_valid_values(component: str):
    schema = json.loads((lint.CHART / "values.schema.json").read_text())
    settings = {setting.key: setting for setting in settings_of(STRUCTS[component])}
    offered = schema["properties"][component]["properties"]["config"]
    for path in values_table.leaves(schema, offered):
        part = values_table.part_at(schema, (component, "config", *path))
        default = settings[".".join(path)].default
        jsonschema.validate(json.loads(msgspec.json.encode(default)), part)
        jsonschema.validate(part.get("default", default), part)


@pytest.mark.parametrize("component", SERVICES)
def test_what_the_chart_is_said_to_set_or_to_leave_out_is_a_setting_of_the_service(component: str):
    known = {setting.key for setting in settings_of(STRUCTS[component])}
    assert NOT_OFFERED[component] <= known
    everywhere = {setting.key for struct in STRUCTS.values() for setting in settings_of(struct)}
    assert everywhere >= SET_BY_CHART


@pytest.mark.parametrize("component", SERVICES)
def test_a_setting_that_the_chart_owns_cannot_be_set_twice(component: str):
    with pytest.raises(lint.ChartError, match=rf"{component}.config.server: Additional property port is not allowed"):
        release(HUB, f"{component}.config.server.port=1")


@pytest.mark.parametrize("component", SERVICES)
def test_arguments_are_those_of_the_entry_point(component: str, tmp_path: Path):
    main = importlib.import_module(f"penstock_{component}.__main__")
    assert "from_command_line" in inspect.getsource(main)
    arguments = release(DEMO).container(component)["args"]
    assert arguments == ["--config", "/etc/penstock/config.yaml"]
    assert release(DEMO).mounts(component)["/etc/penstock"]["name"] == "config"
    assert release(DEMO).volumes(component)["config"]["configMap"]["name"] == f"demo-penstock-{component}"
    missing = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match="No such file"):
        from_command_line(STRUCTS[component], prog="x", description="", argv=[arguments[0], str(missing)]).load()


@pytest.mark.parametrize("component", SERVICES)
def test_services_listen_on_every_address_of_their_pod_whatever_its_family(component: str, tmp_path: Path):
    config = load(release(HUB), component, tmp_path)
    listeners = [config.server, config.http if component == "frontend" else config.metrics]
    assert [listener.host for listener in listeners] == ["::", "::"]
