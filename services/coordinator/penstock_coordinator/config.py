"""Configuration of the coordinator.

The structs validate every value when they are created. ``penstock_common.config.loader`` refuses unknown keys. The
description of a field is the source of its ``--help`` text, of docs/reference/settings.md and of the chart.
"""

import itertools
from collections.abc import Mapping, Set
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from penstock_common.config.checks import ENGINES_DECIDE, check_fields
from penstock_common.config.sections import LogConfig, MetricsConfig, PeersConfig, ServerConfig, TracingConfig
from penstock_common.config.setting_dependencies import OF_ALL, Need, Needs, on
from penstock_common.config.settings import REREAD, ByteSize
from penstock_common.errors import ConfigError, nearest
from penstock_common.types.cluster import DEFAULT_POOL

# The settings below have an effect only together with another setting.

NEEDS: Needs = (
    *OF_ALL,
    Need(("peers.",), (on("server.tls.ca"),)),
    Need(("kubernetes.ranks_per_pod",), (on("kubernetes.stateful_sets"),)),
    Need(
        ("kubernetes.min_replicas", "kubernetes.max_replicas"),
        (on("kubernetes.deployments"), on("kubernetes.leader_worker_sets"), on("kubernetes.stateful_sets")),
    ),
)


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the signals that autoscalers receive about the pools of engines.

    Targets and times are defaults for ScaledObjects that do not set them.
    """

    pools: Annotated[
        tuple[str, ...], Meta(description="Names of the pools, including pools that have no engine now.")
    ] = (DEFAULT_POOL,)
    target_load: Annotated[
        float,
        Meta(
            ge=0.01,
            le=100,
            description=(
                "Target load of an engine, on average: its running and waiting requests, divided by the number of "
                "requests that it can run at once."
            ),
        ),
    ] = 0.8
    target_kv_usage: Annotated[
        float,
        Meta(ge=0.01, le=1, description="Target KV cache usage of an engine, on average, as a fraction."),
    ] = 0.8
    slots: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description=(
                "Number of requests that an engine can run at once, for pools without engines and for engines that "
                "do not report it."
            ),
        ),
    ] = 256
    idle_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description=("Seconds after the last request of a pool for which the pool still counts as in use."),
        ),
    ] = 300.0

    def __post_init__(self) -> None:
        check_fields("scaling", self)


class KubernetesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Objects that the coordinator may change in its Kubernetes namespace, with its pod's service account.

    By default, the coordinator changes no objects.
    """

    deletion_costs: Annotated[
        bool,
        Meta(
            description=(
                "Set the annotation controller.kubernetes.io/pod-deletion-cost of engine pods by their load, so that "
                "Kubernetes removes idle engines first. Pod names must equal the engine_id."
            )
        ),
    ] = False
    deployments: Annotated[
        dict[str, str], Meta(description="Deployment of each pool, for the RPC Scale to change its number of pods.")
    ] = {}
    leader_worker_sets: Annotated[
        dict[str, str],
        Meta(
            description=(
                "LeaderWorkerSet of each pool with several pods per engine, for the RPC Scale to change its number "
                "of groups."
            )
        ),
    ] = {}
    stateful_sets: Annotated[
        dict[str, str],
        Meta(
            description=(
                "StatefulSet of each pool with a data-parallel group. The coordinator adapts the number of pods to the "
                "number of ranks that the RPC Scale sets."
            )
        ),
    ] = {}
    ranks_per_pod: Annotated[
        dict[str, Annotated[int, Meta(ge=1, le=64)]],
        Meta(description="Number of ranks per pod, for pools of stateful_sets; default: 1."),
    ] = {}
    owners: Annotated[
        dict[str, str],
        Meta(
            description=(
                "Controller that owns the number of engines, by pool. The RPC Scale is refused for these pools."
            )
        ),
    ] = {}
    min_replicas: Annotated[
        dict[str, Annotated[int, Meta(ge=0, le=10_000)]],
        Meta(description="Minimum number of engines for the RPC Scale, by pool; default: 0."),
    ] = {}
    max_replicas: Annotated[
        int, Meta(ge=1, le=10_000, description="Maximum number of engines of a pool for the RPC Scale.")
    ] = 100

    def __post_init__(self) -> None:
        check_fields("kubernetes", self)
        workloads = [(name, getattr(self, name)) for name in ("deployments", "leader_worker_sets", "stateful_sets")]
        for (name, pools), (other, others) in itertools.combinations(workloads, 2):
            if twice := pools.keys() & others.keys():
                raise ConfigError(
                    f"kubernetes.{name} and kubernetes.{other} both have pool {min(twice)!r}; remove the pool from one "
                    "of the two settings"
                )
        if unknown := self.ranks_per_pod.keys() - self.stateful_sets.keys():
            raise ConfigError(
                f"kubernetes.ranks_per_pod has pool {min(unknown)!r}, but kubernetes.stateful_sets does not; add the pool to "
                "stateful_sets, or remove it from ranks_per_pod"
            )
        for pool, fewest in self.min_replicas.items():
            if any(pools for _, pools in workloads) and pool not in self.pools:
                known = ", ".join(sorted(self.pools))
                raise ConfigError(
                    f"kubernetes.min_replicas has pool {pool!r}; existing pools: {known}{nearest(pool, self.pools)}"
                )
            if fewest > self.max_replicas:
                raise ConfigError(
                    f"kubernetes.min_replicas.{pool} is {fewest}; it must not exceed max_replicas = {self.max_replicas}"
                )

    @property
    def enabled(self) -> bool:
        """Whether the coordinator may change objects in Kubernetes."""
        return self.deletion_costs or bool(self.deployments or self.leader_worker_sets or self.stateful_sets)

    @property
    def pools(self) -> Set[str]:
        """Names of the pools for which these settings have a workload or an owner."""
        owned = self.deployments, self.leader_worker_sets, self.stateful_sets, self.owners
        return {pool for pools in owned for pool in pools}


class LoraNamesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the LoRA adapter names that frontends share through the coordinator."""

    max_registered: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Maximum number of adapter names per model. Further names are refused."),
    ] = 4096
    max_model_bytes: Annotated[
        ByteSize,
        Meta(ge=64 * 1024, description="Maximum memory for the names and paths of a model's adapters, in bytes."),
    ] = 8 * 1024 * 1024
    max_models: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description=("Maximum number of models with adapter names. Adapters of further models are refused."),
        ),
    ] = 256
    max_bytes: Annotated[
        ByteSize,
        Meta(ge=64 * 1024, description="Maximum memory for the names and paths of all models' adapters, in bytes."),
    ] = 64 * 1024 * 1024
    forget_after: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description=(
                "Seconds after which the names of a model without frontends are dropped. They are dropped earlier if "
                "other models need the memory."
            ),
        ),
    ] = 600.0

    def __post_init__(self) -> None:
        check_fields("lora", self)


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the coordinator."""

    NEEDS: ClassVar[Needs] = NEEDS
    REMOVED: ClassVar[Mapping[str, str]] = {"wedged_after": ENGINES_DECIDE}

    lease_seconds: Annotated[
        float,
        Meta(
            ge=0.1,
            le=3600,
            description=(
                "Seconds without a message from an engine after which the coordinator removes the engine from the "
                "cluster."
            ),
        ),
    ] = 5.0
    view_interval: Annotated[
        float,
        Meta(
            ge=0.01,
            le=60,
            description=(
                "Seconds between two views that the coordinator sends to frontends, if only loads have changed. The "
                "interval is longer if max_reports_per_second makes engines report less often."
            ),
        ),
    ] = 0.1
    max_reports_per_second: Annotated[
        float,
        Meta(
            ge=1,
            le=1_000_000,
            description=(
                "Maximum number of load reports per second from all engines of a pool. In larger pools, engines report "
                "less often, and the coordinator sends views less often."
            ),
        ),
    ] = 2000.0
    # After a restart of the coordinator, engines need time to reconnect. A view without these engines would end their
    # requests.
    restart_grace: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=3600,
                description=(
                    "Seconds after its start that the coordinator waits for engines to reconnect, before it sends the "
                    "first view to frontends. Unset: lease_seconds."
                ),
            ),
        ]
        | None
    ) = None
    scaling: ScalingConfig = ScalingConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    lora: LoraNamesConfig = LoraNamesConfig()
    server: ServerConfig = ServerConfig(port=50050)
    peers: PeersConfig = PeersConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: Annotated[LogConfig, REREAD] = LogConfig()
    tracing: TracingConfig = TracingConfig()

    def __post_init__(self) -> None:
        check_fields("", self)

    @property
    def first_view_after(self) -> float:
        """Seconds from the start to the first view."""
        return self.lease_seconds if self.restart_grace is None else self.restart_grace
