"""What ``penstock serve`` runs: from its options to the processes and their configuration, without starting anything."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock_common import checkpoint
from penstock_common.checkpoint import looks_like_a_path
from penstock_common.config import check_range, require
from penstock_common.errors import ConfigError, nearest
from penstock_local.devices import assign
from penstock_local.hub import check_hub
from penstock_local.ports import LOOPBACK, check_free
from penstock_local.process import ProcessSpec
from penstock_local.settings import Settings, apply_settings

DRAIN_SECONDS = 30.0
_STOP_MARGIN = 10.0
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve and where. ``kv_cache_memory`` is in bytes per engine, ``max_model_len`` in tokens.

    ``threads_per_engine`` None shares this machine's cores evenly. ``settings``: what has no option here, see ``Settings``.
    """

    model: str
    served_model_name: str = ""
    engines: int = 1
    host: str = LOOPBACK
    grpc_port: int = 50051
    http_port: int = 8000
    admin_port: int = 50053
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    kv_cache_memory: int | None = None
    threads_per_engine: int | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    settings: Settings = {}

    def __post_init__(self) -> None:
        require("MODEL", self.model)
        check_range("--engines", self.engines, low=1, high=64)
        check_range("--max-model-len", self.max_model_len, low=1)
        check_range("--kv-cache-memory", self.kv_cache_memory, low=1)
        check_range("--threads-per-engine", self.threads_per_engine, low=1, high=1024)
        for flag, port in self.public_ports.items():
            check_range(flag, port, low=1, high=65_535)
        if len(set(self.public_ports.values())) < len(self.public_ports):
            ports = ", ".join(f"{flag} {port}" for flag, port in self.public_ports.items())
            raise ConfigError(f"the ports must differ: {ports}")

    def with_settings(self, service: str, config: dict[str, Any]) -> dict[str, Any]:
        """A service's configuration with what ``settings`` say of it."""
        return apply_settings(config, self.settings.get(service, {}))

    @property
    def public_ports(self) -> dict[str, int]:
        """The ports that users choose, by flag."""
        return {"--grpc-port": self.grpc_port, "--http-port": self.http_port, "--admin-port": self.admin_port}

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


def check(options: ServeOptions) -> None:
    """Find out before anything starts what would fail later. Raises ConfigError."""
    model = options.with_settings("engine", {}).get("model", {})
    check_model(options.model, trust_remote_code=bool(model.get("trust_remote_code")))
    if not Path(options.model).expanduser().is_dir():
        check_hub(options.model, str(model.get("revision") or ""))
    for flag, port in options.public_ports.items():
        check_free(LOOPBACK if flag == "--admin-port" else options.host, port, flag=flag)


def check_model(model: str, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigError when the files of ``model`` show that it cannot be served. An id on the hub passes: see ``check_hub``."""
    if not Path(model).expanduser().exists() and (looks_like_a_path(model) or not _HUB_ID.fullmatch(model)):
        path = Path(model).expanduser()
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"model {model}: no such directory{nearest(path.name, siblings)}")
    if problem := checkpoint.problem(model, trust_remote_code=trust_remote_code):
        raise ConfigError(f"model {problem}")


def plan(
    options: ServeOptions, *, internal_ports: Sequence[int], cores: int, gpus: Sequence[str] = ()
) -> list[ProcessSpec]:
    """The processes to run. ``internal_ports``: one for the coordinator, then one per engine, all on loopback. ``gpus``: those of
    this machine, see ``devices``. Raises ConfigError for more engines than GPUs to compute on.
    """
    coordinator_port, *engine_ports = internal_ports
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
    frontend = ProcessSpec(
        name="frontend",
        module="penstock_frontend",
        config=options.with_settings(
            "frontend",
            {
                "model": _model_config(options),
                "coordinator": {"address": coordinator_address},
                "server": {"host": options.host, "port": options.grpc_port},
                "admin": {"host": LOOPBACK, "port": options.admin_port},
                "http": {"host": options.host, "port": options.http_port},
                "drain_timeout": DRAIN_SECONDS,
                "log": {"level": options.log_level},
            },
        ),
        address=options.client_address,
        stop_stage=0,
        stop_timeout=DRAIN_SECONDS + _STOP_MARGIN,
    )
    return [coordinator, *engines, frontend]


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
