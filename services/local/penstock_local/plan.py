"""What ``penstock serve`` runs: from its options to the processes and their configuration, without starting anything."""

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock_common import checkpoint
from penstock_common.checkpoint import looks_like_a_path
from penstock_common.config.checks import check_range, require
from penstock_common.errors import ConfigError, nearest
from penstock_common.memory import Memory
from penstock_local.cache_memory import check_cache_memory
from penstock_local.devices import assign
from penstock_local.hub import check_hub
from penstock_local.ports import LOOPBACK, check_free
from penstock_local.process import ProcessSpec
from penstock_local.settings import Settings, apply_settings

DRAIN_SECONDS = 30.0
"""Time that engines and frontends give running requests when they stop."""
_STOP_MARGIN = 10.0
"""Seconds beyond the drain until a service that has not stopped is killed."""
MAX_FRONTENDS = 64
_EACH_FRONTENDS_OWN = ("server.health_port", "metrics.host", "metrics.port", "http.engine_metrics")
"""Settings that the command sets differently for each of several frontends."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve and where: the flags of ``penstock serve``."""

    model: str
    """Directory of a checkpoint, or its id on the hub."""
    served_model_name: str = ""
    """What clients call the model; empty: the last part of ``model``."""
    engines: int = 1
    """Engine processes, each with the whole model."""
    frontends: int = 1
    """Frontend processes. Several share ``grpc_port`` and ``http_port``."""
    host: str = LOOPBACK
    """Interface of the public ports."""
    grpc_port: int = 50051
    http_port: int = 8000
    """Several frontends have their metrics at the ports that follow this one."""
    admin_port: int = 50053
    """Of the first frontend's operators' API; further frontends have the ports that follow."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    """Longest sequence in tokens; None: what the engine finds to fit."""
    kv_cache_memory: int | None = None
    """Bytes of each engine; None: what the engine finds to be free."""
    threads_per_engine: int | None = None
    """CPU threads; None: this machine's cores, shared evenly."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    settings: Settings = {}
    """Settings that have no flag of their own, by service and key."""

    def __post_init__(self) -> None:
        require("MODEL", self.model)
        check_range("--engines", self.engines, low=1, high=64)
        check_range("--frontends", self.frontends, low=1, high=MAX_FRONTENDS)
        if self.frontends > 1:
            self._check_sharing()
        check_range("--max-model-len", self.max_model_len, low=1)
        check_range("--kv-cache-memory", self.kv_cache_memory, low=1)
        check_range("--threads-per-engine", self.threads_per_engine, low=1, high=1024)
        for flag, port in (
            ("--grpc-port", self.grpc_port),
            ("--http-port", self.http_port),
            ("--admin-port", self.admin_port),
        ):
            check_range(flag, port, low=1, high=65_535)
        ports = self.all_ports
        if (highest := max(ports, key=lambda each: each[1]))[1] > 65_535:
            raise ConfigError(f"{highest[0]}: with --frontends {self.frontends} the last one would need {highest[1]}")
        if len({port for _, port in ports}) < len(ports):
            raise ConfigError(f"the ports must differ: {', '.join(f'{flag} {port}' for flag, port in ports)}")

    def with_settings(self, service: str, config: dict[str, Any]) -> dict[str, Any]:
        """A service's configuration with what ``settings`` say of it."""
        return apply_settings(config, self.settings.get(service, {}))

    @property
    def admin_ports(self) -> list[int]:
        """The port of each frontend's operators' API."""
        return [self.admin_port + i for i in range(self.frontends)]

    @property
    def metrics_ports(self) -> list[int]:
        """The port of each frontend's own ``/metrics``; empty for a single frontend, whose metrics are at the HTTP port."""
        return [self.http_port + 1 + i for i in range(self.frontends)] if self.frontends > 1 else []

    @property
    def all_ports(self) -> list[tuple[str, int]]:
        """Every port that users see, each with the flag that moves it."""
        return [
            ("--grpc-port", self.grpc_port),
            ("--http-port", self.http_port),
            *(("--admin-port", port) for port in self.admin_ports),
            *(("--http-port", port) for port in self.metrics_ports),
        ]

    def _check_sharing(self) -> None:
        if not hasattr(socket, "SO_REUSEPORT"):
            raise ConfigError(f"--frontends is {self.frontends}; this system has no SO_REUSEPORT: it must be 1")
        for key in _EACH_FRONTENDS_OWN:
            if key in self.settings.get("frontend", {}):
                raise ConfigError(f"--set frontend.{key}: with --frontends {self.frontends} each one has its own")

    @property
    def model_name(self) -> str:
        """The name clients use: the given one, or the last part of the model's path or hub id."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model).expanduser()
        return path.resolve().name if path.is_dir() else self.model.rsplit("/", 1)[-1]

    @property
    def client_address(self) -> str:
        """Where a client on this machine reaches the gRPC API."""
        return f"{self.client_host}:{self.grpc_port}"

    @property
    def client_host(self) -> str:
        """The host that a client on this machine connects to."""
        return LOOPBACK if self.host in ("0.0.0.0", "localhost") else self.host


def check(options: ServeOptions, *, gpus: Sequence[str] = (), memory: Memory | None = None) -> None:
    """Raise ConfigError for what would fail after the start. ``gpus`` and ``memory``: those of this machine."""
    settings = options.with_settings("engine", {})
    model, cache = settings.get("model", {}), settings.get("cache", {})
    check_cache_memory(
        "engine.cache.kv_cache_memory" if "kv_cache_memory" in cache else "--kv-cache-memory",
        cache.get("kv_cache_memory", options.kv_cache_memory),
        device=model.get("device", options.device),
        gpus=gpus,
        memory=memory,
        engines=options.engines,
    )
    check_model(options.model, trust_remote_code=bool(model.get("trust_remote_code")))
    if not Path(options.model).expanduser().is_dir():
        check_hub(options.model, str(model.get("revision") or ""))
    public = (options.grpc_port, options.http_port)
    for flag, port in options.all_ports:
        check_free(options.host if port in public else LOOPBACK, port, flag=flag)


def check_model(model: str, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigError when the files of ``model`` show that it cannot be served. An id on the hub is not looked up here."""
    if not Path(model).expanduser().exists() and (looks_like_a_path(model) or not _HUB_ID.fullmatch(model)):
        path = Path(model).expanduser()
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"model {model}: no such directory{nearest(path.name, siblings)}")
    if problem := checkpoint.problem(model, trust_remote_code=trust_remote_code):
        raise ConfigError(f"model {problem}")


def plan(
    options: ServeOptions, *, internal_ports: Sequence[int], cores: int, gpus: Sequence[str] = ()
) -> list[ProcessSpec]:
    """The processes to run. ``internal_ports``: as many as ``num_internal_ports`` says, on loopback. ``gpus``: those of this
    machine, as CUDA_VISIBLE_DEVICES names them. Raises ConfigError for more engines than GPUs to compute on.
    """
    coordinator_port, *others = internal_ports
    engine_ports, health_ports = others[: options.engines], others[options.engines :]
    coordinator_address = f"{LOOPBACK}:{coordinator_port}"
    devices = assign(options.engines, options.device, gpus)
    threads = options.threads_per_engine or max(1, cores // options.engines)
    coordinator = ProcessSpec(
        name="coordinator",
        module="penstock_coordinator",
        config=options.with_settings(
            "coordinator",
            {
                "restart_grace": 0.0,  # no engine can be older than this coordinator: they end together
                "server": {"host": LOOPBACK, "port": coordinator_port},
                "log": {"level": options.log_level},
            },
        ),
        address=coordinator_address,
        stop_stage=2,
        stop_timeout=_STOP_MARGIN,
    )
    engines = [
        ProcessSpec(
            name=f"engine-{i}",
            module="penstock_enginecore",
            config=options.with_settings(
                "engine", _engine_config(options, f"engine-{i}", port, coordinator_address, threads)
            ),
            address=f"{LOOPBACK}:{port}",
            stop_stage=1,
            stop_timeout=DRAIN_SECONDS + _STOP_MARGIN,
            env={"OMP_NUM_THREADS": str(threads)},
            own_env=devices[i],
        )
        for i, port in enumerate(engine_ports)
    ]
    return [coordinator, *engines, *_frontends(options, coordinator_address, health_ports)]


def num_internal_ports(options: ServeOptions) -> int:
    """How many ports the processes need among themselves: of the coordinator, of each engine, and for the health of each frontend
    where several share the port at which it is asked for otherwise.
    """
    return 1 + options.engines + (options.frontends if options.frontends > 1 else 0)


def _frontends(options: ServeOptions, coordinator_address: str, health_ports: Sequence[int]) -> list[ProcessSpec]:
    if options.frontends == 1:
        config = _frontend_config(options, coordinator_address, options.admin_port)
        return [_frontend("frontend", options.with_settings("frontend", config), options.client_address)]
    specs = []
    for i, health_port in enumerate(health_ports):
        config = _frontend_config(options, coordinator_address, options.admin_ports[i])
        config["frontend_id"] = f"frontend-{i}"
        config["server"] |= {"reuse_port": True, "health_port": health_port}
        # All know the same engines: one tells of their load.
        config["http"] |= {"reuse_port": True, "engine_metrics": i == 0}
        config["metrics"] = {"host": LOOPBACK, "port": options.metrics_ports[i]}
        address = f"{options.client_host}:{health_port}"
        specs.append(_frontend(f"frontend-{i}", options.with_settings("frontend", config), address, plain_health=True))
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
        "model": _model_config(options),
        "coordinator": {"address": coordinator_address},
        "server": {"host": options.host, "port": options.grpc_port},
        "admin": {"host": LOOPBACK, "port": admin_port},
        "http": {"host": options.host, "port": options.http_port},
        "drain_timeout": DRAIN_SECONDS,
        "log": {"level": options.log_level},
    }


def _model_config(options: ServeOptions) -> dict[str, Any]:
    path = Path(options.model).expanduser()
    return {"path": str(path) if path.is_dir() else options.model, "served_model_name": options.model_name}


def _engine_config(
    options: ServeOptions, engine_id: str, port: int, coordinator_address: str, threads: int
) -> dict[str, Any]:
    return {
        "engine_id": engine_id,
        "model": {
            **_model_config(options),
            "dtype": options.dtype,
            "device": options.device,
            "max_model_len": options.max_model_len,
        },
        "cache": {"kv_cache_memory": options.kv_cache_memory},
        "executor": {"num_threads": threads},
        "coordinator": {"address": coordinator_address, "advertise": f"{LOOPBACK}:{port}"},
        "server": {"host": LOOPBACK, "port": port},
        "log": {"level": options.log_level},
        "drain_timeout": DRAIN_SECONDS,
    }
