"""Processes that ``penstock serve`` starts, derived from its options alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from penstock_common.config.loader import load
from penstock_common.errors import ConfigError
from penstock_common.memory import Memory
from penstock_coordinator.config import CoordinatorConfig
from penstock_enginecore.config import EngineCoreConfig
from penstock_frontend.config import FrontendConfig
from penstock_local.serving.machine_resources import check_cache_memory
from penstock_local.serving.plan import check, check_model, engine_spec, needs_secret, num_internal_ports, plan
from penstock_local.serving.serve_options import ServeOptions
from penstock_local.serving.supervisor import ProcessSpec

DEMO_MODEL = Path(__file__).resolve().parents[4] / "examples/demo_model/penstock-tiny"
T = TypeVar("T", bound=msgspec.Struct)


def specs(cores: int = 4, gpus: Sequence[str] = (), **options: Any) -> dict[str, ProcessSpec]:
    chosen = ServeOptions(**{"model": "org/name", **options})
    ports = range(20_001, 20_001 + num_internal_ports(chosen))
    return {spec.name: spec for spec in plan(chosen, internal_ports=ports, cores=cores, gpus=gpus)}


def read(config_type: type[T], spec: ProcessSpec, tmp_path: Path) -> T:
    """Return the config as the service reads it."""
    file = tmp_path / f"{spec.name}.yaml"
    file.write_bytes(msgspec.yaml.encode(spec.config))
    return load(config_type, file=file, environ={})


def test_one_process_per_service_and_engine() -> None:
    assert [(s.name, s.module) for s in specs(engines=2).values()] == [
        ("coordinator", "penstock_coordinator"),
        ("engine-0", "penstock_enginecore"),
        ("engine-1", "penstock_enginecore"),
        ("frontend", "penstock_frontend"),
    ]


def test_the_frontend_stops_before_the_engines_and_those_before_the_coordinator() -> None:
    stages = {name: spec.stop_stage for name, spec in specs(engines=2).items()}
    assert stages["frontend"] < stages["engine-0"] == stages["engine-1"] < stages["coordinator"]


def test_a_service_has_more_time_to_stop_than_it_takes_to_drain() -> None:
    for spec in specs().values():
        assert spec.stop_timeout > spec.config.get("drain_timeout", 0)


def test_engines_get_the_options_of_the_model(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "max_model_len": 512, "kv_cache_memory": 2**29}
    config = read(
        EngineCoreConfig, specs(engines=2, served_model_name=("me", "other"), **options)["engine-1"], tmp_path
    )
    assert (config.model.path, config.model.name, config.engine_id) == ("org/name", "me", "engine-1")
    assert (config.model.dtype, config.model.device, config.model.max_model_len) == ("bfloat16", "cpu", 512)
    assert config.cache.kv_cache_memory == 2**29
    assert (config.server.host, config.server.port) == ("127.0.0.1", 20_003)
    assert (config.coordinator.address, config.coordinator.advertise) == ("127.0.0.1:20001", "127.0.0.1:20003")


def test_frontends_alone_know_the_further_names_of_the_model(tmp_path: Path) -> None:
    planned = specs(served_model_name=("me", "gpt-4o", "claude"))
    assert read(FrontendConfig, planned["frontend"], tmp_path).model.aliases == {"gpt-4o": "me", "claude": "me"}
    assert planned["engine-0"].config["model"]["served_model_name"] == "me"
    assert "aliases" not in planned["engine-0"].config["model"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"served_model_name": ("a", "a")}, "--served-model-name 'a' is given twice"),
        ({"served_model_name": ("a", "")}, "--served-model-name '' is empty"),
        (
            {"served_model_name": ("a", "b"), "settings": {"frontend": {"model.aliases": {"c": "a"}}}},
            "--served-model-name is repeated and --set frontend.model.aliases is set",
        ),
    ],
)
def test_names_that_cannot_be_served_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeOptions(model="org/name", **fields)


def test_the_frontend_listens_where_the_user_said(tmp_path: Path) -> None:
    spec = specs(host="0.0.0.0", grpc_port=1001, http_port=1002, admin_port=1003)["frontend"]
    config = read(FrontendConfig, spec, tmp_path)
    assert (config.server.host, config.server.port) == ("0.0.0.0", 1001)
    assert (config.http.host, config.http.port) == ("0.0.0.0", 1002)
    assert (config.admin.host, config.admin.port) == ("127.0.0.1", 1003)
    assert config.coordinator.address == "127.0.0.1:20001"
    assert spec.address == "127.0.0.1:1001"


def test_several_frontends_share_the_public_ports_and_nothing_else(tmp_path: Path) -> None:
    chosen = specs(frontends=2, engines=2, host="0.0.0.0", grpc_port=1001, http_port=1002, admin_port=1010)
    configs = [read(FrontendConfig, chosen[name], tmp_path) for name in ("frontend-0", "frontend-1")]
    assert [(c.server.port, c.server.reuse_port) for c in configs] == [(1001, True), (1001, True)]
    assert [(c.http.port, c.http.reuse_port) for c in configs] == [(1002, True), (1002, True)]
    assert [c.frontend_id for c in configs] == ["frontend-0", "frontend-1"]
    assert [(c.admin.host, c.admin.port) for c in configs] == [("127.0.0.1", 1010), ("127.0.0.1", 1011)]
    assert [(c.metrics.host, c.metrics.port) for c in configs] == [("127.0.0.1", 1003), ("127.0.0.1", 1004)]
    assert [c.http.engine_metrics for c in configs] == [True, False]


def test_each_of_several_frontends_is_asked_for_its_own_health(tmp_path: Path) -> None:
    settings = {"frontend": {"server.tls.certificate": "/c", "server.tls.key": "/k"}}
    chosen = specs(frontends=2, settings=settings)
    both = [chosen["frontend-0"], chosen["frontend-1"]]
    assert [spec.address for spec in both] == ["127.0.0.1:20003", "127.0.0.1:20004"]
    assert [spec.config["server"]["health_port"] for spec in both] == [20_003, 20_004]
    assert not any(spec.secured for spec in both)


def test_a_single_frontend_shares_no_port(tmp_path: Path) -> None:
    config = read(FrontendConfig, specs()["frontend"], tmp_path)
    assert (config.server.reuse_port, config.http.reuse_port, config.metrics.port) == (False, False, -1)


@pytest.mark.parametrize("count", [0, -1, 65])
def test_a_number_of_frontends_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"--frontends is {count}; it must be"):
        ServeOptions(model="org/name", frontends=count)


def test_several_frontends_need_a_system_that_shares_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("socket.SO_REUSEPORT")
    with pytest.raises(ConfigError, match="--frontends is 2; it must be 1, because this system has no SO_REUSEPORT"):
        ServeOptions(model="org/name", frontends=2)
    ServeOptions(model="org/name")


def test_a_setting_that_each_frontend_must_have_its_own_of_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set frontend.metrics.port is not allowed with --frontends 2"):
        ServeOptions(model="org/name", frontends=2, settings={"frontend": {"metrics.port": 9000}})


def test_ports_of_several_frontends_that_meet_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the ports must differ: .*--admin-port 50051"):
        ServeOptions(model="org/name", frontends=2, grpc_port=50_051, admin_port=50_050)
    with pytest.raises(ConfigError, match=r"--admin-port: with --frontends 2 the highest port would be 65536"):
        ServeOptions(model="org/name", frontends=2, admin_port=65_535)


def test_the_coordinator_listens_on_loopback_and_waits_for_no_member(tmp_path: Path) -> None:
    config = read(CoordinatorConfig, specs(host="0.0.0.0")["coordinator"], tmp_path)
    assert (config.server.host, config.server.port) == ("127.0.0.1", 20_001)
    assert config.first_view_after == 0


def test_every_service_knows_the_model_by_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    planned = specs(model=f"{tmp_path}/tiny/")
    assert planned["engine-0"].config["model"]["served_model_name"] == "tiny"
    assert planned["frontend"].config["model"]["served_model_name"] == "tiny"


@pytest.mark.parametrize(("cores", "engines", "threads"), [(4, 1, 4), (4, 2, 2), (4, 3, 1), (2, 4, 1)])
def test_engines_share_the_cores(cores: int, engines: int, threads: int) -> None:
    for name, spec in specs(cores=cores, engines=engines).items():
        if name.startswith("engine"):
            assert spec.config["executor"]["num_threads"] == threads
            assert spec.env["OMP_NUM_THREADS"] == str(threads)


def test_workers_of_an_engine_share_its_cores_and_have_a_gpu_each() -> None:
    planned = specs(cores=8, engines=2, pipeline_parallel_size=2, device="cuda", gpus=["0", "1", "2", "3"])
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    assert planned["engine-0"].config["executor"] == {"num_threads": 2, **sizes}
    assert planned["engine-0"].env["OMP_NUM_THREADS"] == "2"
    seen = [spec.own_env for name, spec in planned.items() if name.startswith("engine")]
    assert seen == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]


def test_each_engine_on_gpus_sees_its_own_whatever_the_environment_says() -> None:
    planned = specs(engines=2, device="cuda", gpus=["2", "5"])
    seen = {name: spec.own_env for name, spec in planned.items() if spec.own_env}
    assert seen == {"engine-0": {"CUDA_VISIBLE_DEVICES": "2"}, "engine-1": {"CUDA_VISIBLE_DEVICES": "5"}}


def test_threads_per_engine_overrides_the_share() -> None:
    assert specs(cores=8, threads_per_engine=3)["engine-0"].config["executor"]["num_threads"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "MODEL is required"),
        ({"engines": 0}, "--engines is 0"),
        ({"max_model_len": 0}, "--max-model-len is 0"),
        ({"kv_cache_memory": 0}, "--kv-cache-memory is 0"),
        ({"threads_per_engine": 0}, "--threads-per-engine is 0"),
        ({"grpc_port": 0}, "--grpc-port is 0"),
        ({"http_port": 70_000}, "--http-port is 70000"),
        ({"prefill_engines": 1}, "--prefill-engines is 1 and --decode-engines 0; .* both must be at least 1"),
        ({"decode_engines": 2}, "--decode-engines is 2 and --prefill-engines 0; .* both must be at least 1"),
        ({"prefill_engines": 65}, "--prefill-engines is 65"),
        ({"prefill_engines": 1, "decode_engines": 1, "engines": 2}, "--prefill-engines is 1 and --engines 2"),
        (
            {"prefill_engines": 1, "decode_engines": 1, "data_parallel_size": 2},
            "--prefill-engines is 1 and --data-parallel-size 2",
        ),
        ({"prefill_engines": 1, "decode_engines": 1, "kv_transfer": "off"}, "--kv-transfer off"),
        ({"kv_transfer": "carrier_pigeon"}, "--kv-transfer is 'carrier_pigeon'"),
        ({"grpc_port": 8000}, "the ports must differ: --grpc-port 8000, --http-port 8000"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeOptions(**{"model": "org/name", **options})


@pytest.mark.parametrize("model", ["gpt2", "org/name", "org/name-1.5B_x"])
def test_a_hub_id_passes(model: str) -> None:
    check_model(model)


@pytest.mark.parametrize("model", ["/no/where", "./nowhere", "~/no/where", "a/b/c", "a b"])
def test_a_model_that_can_only_be_a_path_must_exist(model: str) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        check_model(model)


def test_a_misspelt_path_gets_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "penstock-tiny").mkdir()
    with pytest.raises(ConfigError, match="did you mean 'penstock-tiny'"):
        check_model(f"{tmp_path}/penstock-tyni")


def test_errors_in_the_models_files_are_reported_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_model(str(tmp_path))


def test_a_host_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="--host is .192.0.2.1., but nothing can listen on it"):
        check(ServeOptions(model=str(DEMO_MODEL), host="192.0.2.1"))


MEMORY = Memory("this machine", 24 * 2**30, 16 * 2**30)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"kv_cache_memory": 400_000_000_000},
            r"--kv-cache-memory is 400000000000 bytes \(372\.5 GiB\); this machine has",
        ),
        (
            {"kv_cache_memory": 10 * 2**30, "engines": 2},
            r"\(10\.0 GiB\) for each of 2 engines; .* only 16\.0 GiB of 24\.0 GiB available",
        ),
        (
            {"settings": {"engine": {"cache.kv_cache_memory": "400GB"}}},
            r"engine\.cache\.kv_cache_memory is 400000000000 bytes",
        ),
    ],
)
def test_a_cache_larger_than_the_memory_is_refused_before_anything_is_loaded(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(ServeOptions(model="never/read", **options), memory=MEMORY)


@pytest.mark.parametrize(("device", "gpus"), [("cuda", []), ("auto", ["0"])])
def test_a_cache_on_a_gpu_is_for_its_engine_to_judge(device: str, gpus: list[str]) -> None:
    check_cache_memory("key", 2**60, device=device, gpus=gpus, memory=MEMORY)


def test_a_cache_on_the_cpu_beside_gpus_is_judged() -> None:
    with pytest.raises(ConfigError):
        check_cache_memory("key", 2**60, device="cpu", gpus=["0"], memory=MEMORY)


def test_engines_that_compute_together_know_how_many_they_are(tmp_path: Path) -> None:
    planned = specs(data_parallel_size=3)
    assert [name for name in planned if name.startswith("engine")] == ["engine-0", "engine-1", "engine-2"]
    config = read(EngineCoreConfig, planned["engine-2"], tmp_path)
    assert (config.data_parallel.size, config.data_parallel.min_size) == (3, 1)
    assert not read(EngineCoreConfig, specs(engines=2)["engine-1"], tmp_path).data_parallel.grouped


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"engines": 2}, "--engines 2"), ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2")],
)
def test_what_a_group_cannot_be_is_named(options: dict[str, int], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--data-parallel-size is 2 and {flag}"):
        ServeOptions(model="org/name", data_parallel_size=2, **options)


def test_engines_have_roles_and_a_way_for_keys_and_values(tmp_path: Path) -> None:
    planned = specs(prefill_engines=1, decode_engines=2, cores=6)
    engines = [read(EngineCoreConfig, spec, tmp_path) for name, spec in planned.items() if name.startswith("engine-")]
    assert [(engine.engine_id, engine.role) for engine in engines] == [
        ("engine-0", "prefill"),
        ("engine-1", "decode"),
        ("engine-2", "decode"),
    ]
    assert {(e.kv_transfer.transport, e.kv_transfer.port, e.executor.num_threads) for e in engines} == {("auto", 0, 2)}


@pytest.mark.parametrize(("kv_transfer", "transport"), [("", "off"), ("off", "off"), ("grpc", "grpc")])
def test_engines_of_one_kind_give_no_keys_and_values_unless_asked(
    kv_transfer: str, transport: str, tmp_path: Path
) -> None:
    for name, spec in specs(engines=2, kv_transfer=kv_transfer).items():
        if name.startswith("engine-"):
            config = read(EngineCoreConfig, spec, tmp_path)
            assert (config.role, config.kv_transfer.transport) == ("both", transport)


def test_a_dense_model_is_served_by_engines_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"has no experts to distribute over engines; use --engines 2"):
        check(ServeOptions(model=str(DEMO_MODEL), data_parallel_size=2, grpc_port=1, http_port=2, admin_port=3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora": {"pirate": "/a", "json": "/b"}}, "--lora serves pirate, json, but"),
        ({"lora_directory": "/live"}, "--lora-directory serves the adapters in /live, but"),
        ({"frontend": {"lora.enabled": True}}, "--set frontend.lora.enabled is given, but"),
    ],
)
def test_adapters_that_engines_would_refuse_are_refused_before_the_start(options: dict[str, Any], said: str) -> None:
    frontend = {"frontend": options.pop("frontend", {})}
    none, two = ({**frontend, "engine": {"lora.max_loras": count}} for count in (0, 2))
    with pytest.raises(
        ConfigError, match=rf"{said} engine\.lora\.max_loras is 0, .* use --set engine\.lora\.max_loras=N"
    ):
        check(ServeOptions(model=str(DEMO_MODEL), **options, settings=none))
    ports = {"grpc_port": 23101, "http_port": 23102, "admin_port": 23103}
    check(ServeOptions(model=str(DEMO_MODEL), **options, settings=two, **ports))


def test_credentials_for_the_commands_own_calls_are_required_before_loading() -> None:
    keys = {"settings": {"frontend": {"auth.api_keys": "keys"}}}
    tls = {"settings": {"frontend": {"server.tls.certificate": "edge.crt", "server.tls.key": "edge.key"}}}
    for options, variable in ((keys, "PENSTOCK_API_KEY"), (tls, "PENSTOCK_TLS_CA")):
        with pytest.raises(ConfigError, match=rf"is set, but {variable} is not; .* set {variable} to"):
            check(ServeOptions(model=str(DEMO_MODEL), **options), environ={})
        check(ServeOptions(model=str(DEMO_MODEL), **options), environ={variable: "x"})


# The secret for engines' internal ports.


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, False),
        ({"engines": 2}, False),
        ({"tensor_parallel_size": 2}, False),
        ({"data_parallel_size": 2}, True),
        ({"prefill_engines": 1, "decode_engines": 1}, True),
        ({"kv_transfer": "grpc"}, True),
        ({"settings": {"engine": {"kv_transfer.transport": "grpc"}}}, True),
        ({"settings": {"engine": {"executor.nodes.size": 2}}}, True),
        ({"data_parallel_size": 2, "settings": {"engine": {"parallel.secret_file": "/own"}}}, False),
    ],
)
def test_engines_that_have_ports_for_each_other_need_a_secret(options: dict[str, Any], needed: bool) -> None:
    assert needs_secret(ServeOptions(model="org/name", **options)) is needed


def test_all_engines_get_the_file_of_the_secret_and_one_of_the_user_comes_before(tmp_path: Path) -> None:
    options = ServeOptions(model="org/name", data_parallel_size=2)
    found = plan(options, internal_ports=range(20_001, 20_004), cores=4, secret_file="/tmp/secret")
    later = engine_spec(options, 2, 20_005, "127.0.0.1:1", threads=1, secret_file="/tmp/secret")
    for spec in (found[1], found[2], later):
        assert read(EngineCoreConfig, spec, tmp_path).parallel.secret_file == "/tmp/secret"
    own = ServeOptions(model="org/name", settings={"engine": {"parallel.secret_file": "/own"}})
    spec = engine_spec(own, 0, 20_001, "127.0.0.1:1", threads=1, secret_file="/tmp/secret")
    assert read(EngineCoreConfig, spec, tmp_path).parallel.secret_file == "/own"


def test_frontends_get_the_chat_template_of_the_flag(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}")
    specs_ = specs(chat_template=str(template))
    assert read(FrontendConfig, specs_["frontend"], tmp_path).model.chat_template == str(template)
    assert "chat_template" not in specs_["engine-0"].config["model"]


def test_a_chat_template_that_cannot_be_read_is_refused_before_anything_starts(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("a\n{% if %}")
    options = ServeOptions(
        model=str(DEMO_MODEL), chat_template=str(template), grpc_port=23101, http_port=23102, admin_port=23103
    )
    with pytest.raises(ConfigError, match="--chat-template is '.*own.jinja': line 2: Expected an expression"):
        check(options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_model_len": 2049}, "--max-model-len"),
        ({"settings": {"engine": {"model.max_model_len": 2049}}}, "engine.model.max_model_len"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_length_above_the_models_limit_is_refused_before_the_start(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is 2049, but model .* allows 2048 tokens; lower the value"):
        check(ServeOptions(model=str(DEMO_MODEL), **options), memory=MEMORY)
