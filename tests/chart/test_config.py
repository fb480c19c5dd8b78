"""The config files that the chart writes are those that the services read."""

import importlib
import inspect
import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

from charts import lint, values_table
from penstock_common.config import loader
from penstock_common.config.sections import ServerConfig, TracingConfig
from penstock_common.errors import ConfigError
from penstock_coordinator.config import CoordinatorConfig
from penstock_enginecore.config import EngineCoreConfig
from penstock_frontend.config import FrontendConfig
from tests.chart.rendering import AUTOSCALED, DEMO, HUB, SERVICES, VALUE_SETS, Release, release

STRUCTS: dict[str, type[msgspec.Struct]] = {
    "frontend": FrontendConfig,
    "enginecore": EngineCoreConfig,
    "coordinator": CoordinatorConfig,
}
SET_BY_CHART = {"server.host", "server.port", "metrics.host", "metrics.port", "log.level", "log.format"}
SET_BY_CHART |= {"log.requests", "log.prompts", "http.engine_metrics"}
SET_BY_CHART |= {"tracing.endpoint", "tracing.sample_ratio", "tracing.service_name"}
SET_BY_CHART |= {"model.path", "model.served_model_name", "model.revision", "model.device"}
SET_BY_CHART |= {"coordinator.address", "coordinator.advertise", "engine_id", "drain_timeout", "http.host", "http.port"}
SET_BY_CHART |= {"server.health_port", "auth.api_keys", "auth.jwt.jwks"}
SET_BY_CHART |= {
    f"{hop}.{key}"
    for hop in ("server.tls", "coordinator.tls", "engine_tls", "http.tls")
    for key in ("certificate", "key", "ca", "server_name")
}
# With a coordinator there is no list of engines, a frontend's id is its pod's name, and the admin port stays on loopback. A pod
# has its ports to itself, and a frontend's metrics are at its HTTP port.
ANYWHERE = {f"metrics.tls.{key}" for key in ("certificate", "key", "ca")} | {"server.reuse_port"}
NOT_OFFERED = {
    "frontend": {f"admin.{key}" for key, _ in loader.fields(ServerConfig)}
    | {"engines", "frontend_id", "http.reuse_port"}
    | ANYWHERE,
    "enginecore": {"cache.num_blocks", "scheduler.scheduler"} | ANYWHERE,
    "coordinator": ANYWHERE,
}


def load(rendered: Release, component: str, folder: Path) -> msgspec.Struct:
    """What the service makes of its config file and its environment."""
    file = folder / "config.yaml"
    file.write_text(rendered.config_text(component), encoding="utf-8")
    environ = {name: entry.get("value", "from-the-cluster") for name, entry in rendered.env(component).items()}
    return loader.load(STRUCTS[component], file=file, environ=environ)


@pytest.mark.parametrize("name", sorted(VALUE_SETS))
@pytest.mark.parametrize("component", SERVICES)
def test_every_rendered_config_loads(name: str, component: str, tmp_path: Path):
    assert isinstance(load(release(name), component, tmp_path), STRUCTS[component])


def test_values_reach_the_engine(tmp_path: Path):
    config = load(release(AUTOSCALED), "enginecore", tmp_path)
    assert isinstance(config, EngineCoreConfig)
    assert config.model.name == "chat"
    assert (config.model.dtype, config.model.max_model_len) == ("bfloat16", 32768)
    assert config.scheduler.max_waiting_tokens == 100_000_000
    assert config.server.max_message_bytes == 128 * 1024**2
    assert (config.server.port, config.metrics.port) == (50052, 9100)
    assert config.drain_timeout == 300
    assert config.engine_id == "from-the-cluster"
    assert config.coordinator.advertise == "$(POD_IP):50052"
    assert config.log.format == "json"


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


def test_the_demo_is_small(tmp_path: Path):
    config = load(release(DEMO), "enginecore", tmp_path)
    assert isinstance(config, EngineCoreConfig)
    assert config.cache.kv_cache_memory == 256 * 1024**2
    assert config.executor.num_threads == 2


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
    known = dict(loader.fields(STRUCTS[component])).keys()
    assert offered - known == set(), "values.schema.json offers settings that the service does not have"
    missing = known - offered - SET_BY_CHART - NOT_OFFERED[component]
    assert missing == set(), f"values.schema.json lacks settings of the service; add them under {component}.config"


@pytest.mark.parametrize("component", SERVICES)
def test_the_services_own_defaults_are_valid_values(component: str):
    schema = json.loads((lint.CHART / "values.schema.json").read_text())
    for path in values_table.leaves(schema, schema["properties"][component]["properties"]["config"]):
        part = schema["properties"][component]["properties"]["config"]
        for key in path:
            part = values_table.resolve(schema, part["properties"][key])
        field = dict(loader.fields(STRUCTS[component]))[".".join(path)]
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        if default is not None:  # unset: not among the values
            jsonschema.validate(list(default) if isinstance(default, tuple) else default, part)  # YAML has lists only


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
        loader.from_command_line(STRUCTS[component], prog="x", description="", argv=[arguments[0], str(missing)])
