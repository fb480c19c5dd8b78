"""Plan of ``penstock serve``: turns its options into processes and their configuration, without starting anything."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock_common import checkpoint
from penstock_common.addresses import with_port
from penstock_common.checkpoint import looks_like_a_path
from penstock_common.errors import ConfigError
from penstock_common.memory import Memory
from penstock_local.rpc.connect import API_KEY, PUBLIC
from penstock_local.serving import speculation
from penstock_local.serving.hub_check import check_hub
from penstock_local.serving.machine_resources import LOOPBACK, assign_all, check_cache_memory, check_free, check_host
from penstock_local.serving.serve_options import MAX_LORAS, ServeOptions, given
from penstock_local.serving.supervisor import ProcessSpec
from penstock_local.settings import apply_settings, check_config, check_parsers

DRAIN_SECONDS = 30.0
"""Seconds that running requests have to finish when engines and frontends stop."""
_STOP_MARGIN = 10.0
"""Seconds after the end of the drain until a service that has not stopped is killed."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def with_settings(options: ServeOptions, service: str, config: dict[str, Any]) -> dict[str, Any]:
    """Apply ``options.settings`` of a service to its configuration."""
    return apply_settings(config, options.settings.get(service, {}))


def check(
    options: ServeOptions,
    *,
    gpus: Sequence[str] = (),
    memory: Memory | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Raise ConfigError for problems that would otherwise appear only after the start.

    Args:
        options: Flags of the command.
        gpus: GPUs of this machine.
        memory: Memory of this machine, or None if it is unknown.
        environ: Environment with the credentials for the command's own frontend. If None, credentials are not checked.
    """
    if environ is not None:
        _check_own_client(with_settings(options, "frontend", {}), environ)
    check_host(options.host)
    check_parsers(options.settings.get("frontend", {}))
    for each in options.models:
        _check_one(each, gpus=gpus, memory=memory)
    public = (options.grpc_port, options.http_port)
    for flag, port in options.all_ports:
        check_free(options.host if port in public else LOOPBACK, port, flag=flag)


def _check_one(options: ServeOptions, *, gpus: Sequence[str], memory: Memory | None) -> None:
    """Check the options of one model."""
    settings = with_settings(options, "engine", {"speculative": options.speculation()})
    speculation.check_section(settings["speculative"])
    speculation.check_drafting_model(settings["speculative"])
    model, cache = settings.get("model", {}), settings.get("cache", {})
    check_cache_memory(
        "engine.cache.kv_cache_memory" if "kv_cache_memory" in cache else "--kv-cache-memory",
        cache.get("kv_cache_memory", options.kv_cache_memory),
        device=model.get("device", options.device),
        gpus=gpus,
        memory=memory,
        count=options.num_engines * options.workers_per_engine,
    )
    _check_tiers(options)
    _check_adapters(options)
    check_model(
        options.model,
        trust_remote_code=bool(model.get("trust_remote_code")),
        weights=model.get("load_format") != "dummy",
        media=options.takes_media,
    )
    _check_length(options, model)
    if options.data_parallel_size > 1 and checkpoint.has_experts(options.model) is False:
        raise ConfigError(
            f"--data-parallel-size is {options.data_parallel_size}, but model {options.model} has no experts to "
            f"distribute over engines; use --engines {options.data_parallel_size}"
        )
    if template := _chat_template(options):
        from penstock_frontend.app.assembly import check_chat_template  # This import loads most of the frontend.

        check_chat_template(template, setting="--chat-template")
    if not Path(options.model).expanduser().is_dir():
        check_hub(options.model, str(model.get("revision") or ""))


def check_configs(specs: Sequence[ProcessSpec]) -> None:
    """Check the configuration of the services before any of them starts. Raises ConfigError if a setting is not valid."""
    kinds = {"penstock_coordinator": "coordinator", "penstock_enginecore": "engine", "penstock_frontend": "frontend"}
    # All services of one kind and model have the same settings, so check one service per kind and model.
    for spec in {(spec.module, str(spec.config.get("model"))): spec for spec in specs}.values():
        check_config(kinds[spec.module], spec.config)


def _check_own_client(frontend: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    auth, tls = frontend.get("auth", {}), frontend.get("server", {}).get("tls", {})
    asks = next((key for key in ("api_keys", "jwt") if auth.get(key)), None)
    if asks and not environ.get(API_KEY):
        raise ConfigError(
            f"frontend.auth.{asks} is set, but {API_KEY} is not; the command needs it to check its own frontend's "
            f"health: set {API_KEY} to an API key or token"
        )
    if tls.get("certificate") and not (environ.get(f"{PUBLIC}_CA") or environ.get(f"{PUBLIC}_SERVER_NAME")):
        raise ConfigError(
            f"frontend.server.tls.certificate is set, but {PUBLIC}_CA is not; the command needs it to check its "
            f"own frontend's health: set {PUBLIC}_CA to the CA certificate, and {PUBLIC}_SERVER_NAME to the "
            "certificate's host name unless that is localhost"
        )


def _check_tiers(options: ServeOptions) -> None:
    """Check the cache flags. Engines check the cache settings themselves."""
    if options.disk_cache and not options.host_cache:
        raise ConfigError(
            f"--disk-cache is {options.disk_cache}, but --host-cache is 0; the disk cache stores blocks evicted "
            "from host memory, so set both"
        )
    if bool(options.disk_cache) != bool(options.disk_cache_size):
        raise ConfigError(
            f"--disk-cache is {options.disk_cache or 'empty'} and --disk-cache-size {options.disk_cache_size}; a disk cache "
            "needs a directory and a size"
        )


def max_loras(options: ServeOptions) -> int:
    """Return the setting ``lora.max_loras`` of the engines."""
    lora = with_settings(options, "engine", _engine_config(options, 0, 0, "", 1)).get("lora", {})
    return lora.get("max_loras", 0)  # type: ignore[no-any-return]


def _check_adapters(options: ServeOptions) -> None:
    """Check that the engines support adapters if the frontend serves adapters."""
    if max_loras(options):
        return
    lora = with_settings(options, "frontend", _frontend_config(options, "", 0)).get("lora", {})
    if options.lora:
        serves = f"--lora serves {', '.join(options.lora)}"
    elif options.lora_directory:
        serves = f"--lora-directory serves the adapters in {options.lora_directory}"
    elif setting := next((name for name in ("enabled", "adapters", "directory") if lora.get(name)), ""):
        serves = f"--set frontend.lora.{setting} is given"
    else:
        return
    raise ConfigError(
        f"{serves}, but engine.lora.max_loras is 0, so engines would refuse every request with an adapter; use "
        f"--set engine.lora.max_loras=N with N from 1, e.g. {MAX_LORAS}"
    )


def _check_length(options: ServeOptions, model: Mapping[str, Any]) -> None:
    """Check the sequence length against config.json of the model. ``model``: the settings of the engine's model."""
    length, limit = model.get("max_model_len", options.max_model_len), checkpoint.longest_sequence(options.model)
    if isinstance(length, int) and limit is not None and length > limit:
        name = "engine.model.max_model_len" if "max_model_len" in model else "--max-model-len"
        raise ConfigError(
            f"{name} is {length}, but model {options.model} allows {limit} tokens; lower the value, or leave it out"
        )


def check_model(model: str, *, trust_remote_code: bool = False, weights: bool = True, media: bool = True) -> None:
    """Raise ConfigError if the files of ``model`` show that it cannot be served. A hub id is not looked up here."""
    if not Path(model).expanduser().exists() and (looks_like_a_path(model) or not _HUB_ID.fullmatch(model)):
        raise ConfigError(f"model {model}: {checkpoint.no_directory(model)}")
    if problem := checkpoint.problem(model, trust_remote_code=trust_remote_code, weights=weights, media=media):
        raise ConfigError(f"model {problem}")


def plan(
    options: ServeOptions,
    *,
    internal_ports: Sequence[int],
    cores: int,
    gpus: Sequence[str] = (),
    secret_file: str = "",
) -> list[ProcessSpec]:
    """Return the processes to run.

    Args:
        options: Flags of the command.
        internal_ports: Loopback ports, as many as ``num_internal_ports`` returns.
        cores: CPU cores to divide among the engines.
        gpus: GPUs of this machine, as named in CUDA_VISIBLE_DEVICES.
        secret_file: See ``engine_spec``.

    Raises:
        ConfigError: There are more engines than GPUs to run them on.
    """
    coordinator_port, *others = internal_ports
    engine_ports, health_ports = others[: options.total_engines], others[options.total_engines :]
    coordinator_address = f"{LOOPBACK}:{coordinator_port}"
    needs = [(each.num_engines, each.workers_per_engine, each.device) for each in options.models]
    devices = assign_all(needs, gpus)
    coordinator = ProcessSpec(
        name="coordinator",
        module="penstock_coordinator",
        config=with_settings(
            options,
            "coordinator",
            {
                "restart_grace": 0.0,  # no engine can be older than this coordinator, because all services stop together
                "server": {"host": LOOPBACK, "port": coordinator_port},
                "log": {"level": options.log_level},
            },
        ),
        address=coordinator_address,
        stop_stage=2,
        stop_timeout=_STOP_MARGIN,
    )
    engines = [
        engine_spec(
            each,
            number,
            port,
            coordinator_address,
            threads=threads_per_engine(options, each, cores),
            own_env=own_env,
            secret_file=secret_file,
            place=place,
        )
        for (each, place), number, port, own_env in zip(
            _places(options), range(options.total_engines), engine_ports, devices, strict=True
        )
    ]
    return [coordinator, *engines, *_frontends(options, coordinator_address, health_ports)]


def threads_per_engine(options: ServeOptions, model: ServeOptions, cores: int) -> int:
    """Return the number of CPU threads of each engine of ``model``. By default, all engines divide the cores evenly."""
    return model.threads_per_engine or max(1, cores // options.total_engines)


def _places(options: ServeOptions) -> Iterator[tuple[ServeOptions, int]]:
    """Yield the model of each engine, and the engine's place among the model's engines."""
    for each in options.models:
        yield from ((each, place) for place in range(each.num_engines))


def engine_spec(
    options: ServeOptions,
    number: int,
    port: int,
    coordinator_address: str,
    *,
    threads: int,
    own_env: dict[str, str] | None = None,
    secret_file: str = "",
    place: int | None = None,
) -> ProcessSpec:
    """Return the process of the engine with this number.

    Args:
        options: Flags of the command, for the engine's model.
        number: Number of the engine, from 0.
        port: Port of its gRPC server.
        coordinator_address: Address of the coordinator, as host:port.
        threads: CPU threads of the engine.
        own_env: Environment variables that override the user's.
        secret_file: File with the secret that engines share; empty if the engines need no secret, or if a setting names
            the file.
        place: Place of the engine among the engines of its model. None if it equals ``number``.
    """
    config = _engine_config(options, number, port, coordinator_address, threads)
    config["role"] = options.role(number if place is None else place)
    if secret_file:
        config["parallel"] = {"secret_file": secret_file}
    return ProcessSpec(
        name=_engine_name(number),
        module="penstock_enginecore",
        config=with_settings(options, "engine", config),
        address=f"{LOOPBACK}:{port}",
        stop_stage=1,
        stop_timeout=DRAIN_SECONDS + _STOP_MARGIN,
        env={"OMP_NUM_THREADS": str(max(1, threads // options.workers_per_engine))},
        own_env=own_env or {},
    )


def needs_secret(options: ServeOptions) -> bool:
    """Return whether engines listen for each other or for their nodes, while no setting names a secret for that."""
    return any(_needs_secret(each) for each in options.models)


def _needs_secret(options: ServeOptions) -> bool:
    config = with_settings(options, "engine", _engine_config(options, 0, 0, "", 1))
    in_group = config.get("data_parallel", {}).get("size", 1) > 1
    on_nodes = config["executor"].get("nodes", {}).get("size", 1) > 1
    moves_blocks = config.get("kv_transfer", {}).get("transport", "off") != "off"
    return (in_group or on_nodes or moves_blocks) and "secret_file" not in config.get("parallel", {})


def num_internal_ports(options: ServeOptions) -> int:
    """Return the number of internal ports: one for the coordinator, one per engine, and one health port per frontend.

    A single frontend needs no health port, because its health is checked on the public port. If several frontends share
    the public port, each needs a health port.
    """
    return 1 + options.total_engines + (options.frontends if options.frontends > 1 else 0)


def _frontends(options: ServeOptions, coordinator_address: str, health_ports: Sequence[int]) -> list[ProcessSpec]:
    if options.frontends == 1:
        config = _frontend_config(options, coordinator_address, options.admin_port)
        return [_frontend("frontend", with_settings(options, "frontend", config), options.client_address)]
    specs = []
    for i, health_port in enumerate(health_ports):
        config = _frontend_config(options, coordinator_address, options.admin_ports[i])
        config["frontend_id"] = f"frontend-{i}"
        config["server"] |= {"reuse_port": True, "health_port": health_port}
        # All frontends see the same engines, so only the first exports engine metrics.
        config["http"] |= {"reuse_port": True, "engine_metrics": i == 0}
        config["metrics"] = {"host": LOOPBACK, "port": options.metrics_ports[i]}
        address = with_port(options.client_host, health_port)
        specs.append(_frontend(f"frontend-{i}", with_settings(options, "frontend", config), address, plain_health=True))
    return specs


def _frontend(name: str, config: dict[str, Any], address: str, *, plain_health: bool = False) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        module="penstock_frontend",
        config=config,
        address=address,
        stop_stage=0,
        stop_timeout=DRAIN_SECONDS + _STOP_MARGIN,
        plain_health=plain_health,
    )


def _frontend_config(options: ServeOptions, coordinator_address: str, admin_port: int) -> dict[str, Any]:
    return {
        **_served_config(options),
        **given(models=[with_settings(each, "frontend", _served_config(each)) for each in options.further]),
        "coordinator": {"address": coordinator_address},
        # No maximum age of connections: all frontends stop together, so clients cannot move to another frontend.
        "server": {"host": options.host, "port": options.grpc_port, "max_connection_age": 0},
        "admin": {"host": LOOPBACK, "port": admin_port},
        "http": {"host": options.host, "port": options.http_port, "max_connection_age": 0},
        "drain_timeout": DRAIN_SECONDS,
        "log": {"level": options.log_level},
        **options.media_sections(),
    }


def _served_config(options: ServeOptions) -> dict[str, Any]:
    """Return the frontend's settings of one model."""
    # clients may load more adapters from the directory
    roots = [options.lora_directory] if options.lora_directory else []
    return {
        # Only frontends get the aliases and the chat template. Engines know the model by its first name.
        "model": _model_config(options) | given(aliases=options.aliases, chat_template=_chat_template(options)),
        **given(lora=given(adapters=dict(options.lora), directory=options.lora_directory, roots=roots)),
    }


def _engine_name(number: int) -> str:
    return f"engine-{number}"


def _model_config(options: ServeOptions) -> dict[str, Any]:
    path = Path(options.model).expanduser()
    return {"path": str(path) if path.is_dir() else options.model, "served_model_name": options.model_name}


def _chat_template(options: ServeOptions) -> str:
    """Return the path of the chat template file. Empty if the model's own template is used."""
    return str(Path(options.chat_template).expanduser().absolute()) if options.chat_template else ""


def _tiers(options: ServeOptions, engine_id: str) -> dict[str, Any]:
    """Return the settings of the host cache and the disk cache. Each engine has a separate disk directory."""
    directory = str(Path(options.disk_cache) / engine_id) if options.disk_cache else ""
    return given(host_memory=options.host_cache, disk=directory, disk_size=options.disk_cache_size)


def _engine_config(
    options: ServeOptions, number: int, port: int, coordinator_address: str, threads: int
) -> dict[str, Any]:
    return {
        "engine_id": _engine_name(number),
        "model": {
            **_model_config(options),
            "dtype": options.dtype,
            "quantization": options.quantization,
            "device": options.device,
            "max_model_len": options.max_model_len,
        },
        "cache": {"kv_cache_memory": options.kv_cache_memory, **_tiers(options, _engine_name(number))},
        "executor": {
            "num_threads": max(1, threads // options.workers_per_engine),
            "tensor_parallel_size": options.tensor_parallel_size,
            "pipeline_parallel_size": options.pipeline_parallel_size,
        },
        "coordinator": {"address": coordinator_address, "advertise": f"{LOOPBACK}:{port}"},
        "server": {"host": LOOPBACK, "port": port},
        "log": {"level": options.log_level},
        "drain_timeout": DRAIN_SECONDS,
        **given(
            kv_transfer={"transport": options.transport, "port": 0} if options.transport != "off" else None,
            multimodal=None if options.takes_media else {"enabled": False},
            speculative=options.speculation(),
            lora={"max_loras": MAX_LORAS} if options.lora or options.lora_directory else None,
            data_parallel={"size": options.data_parallel_size} if options.data_parallel_size > 1 else None,
        ),
    }
