"""Configuration of the coordinator.

Every value is validated when the struct is built; unknown keys are refused by ``penstock_common.config.loader``. What a setting
means and which values it may have stands at its field, and from there in ``--help``, docs/reference/settings.md and the chart.
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

# Settings of a coordinator that have an effect only together with another one.

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
    """What autoscalers are told of the pools of engines. Targets and times are those of ScaledObjects that name none."""

    pools: Annotated[
        tuple[str, ...], Meta(description="Names of the pools that there are, also while they have no engine.")
    ] = (DEFAULT_POOL,)
    target_load: Annotated[
        float,
        Meta(
            ge=0.01,
            le=100,
            description="Requests running and waiting that an engine shall have on average, over those that it runs at once.",
        ),
    ] = 0.8
    target_kv_usage: Annotated[
        float,
        Meta(ge=0.01, le=1, description="Fraction of its KV cache that an engine shall use on average."),
    ] = 0.8
    slots: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description="Requests that an engine runs at once, for pools that have none to ask and engines that do not say.",
        ),
    ] = 256
    idle_seconds: Annotated[
        float,
        Meta(ge=0, le=86_400, description="Seconds behind its last request in which a pool still counts as in use."),
    ] = 300.0

    def __post_init__(self) -> None:
        check_fields("scaling", self)


class KubernetesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the coordinator changes in the Kubernetes namespace that it runs in, with the account of its pod; nothing as it is."""

    deletion_costs: Annotated[
        bool,
        Meta(
            description="Write into the annotation controller.kubernetes.io/pod-deletion-cost of engines' pods, whose names "
            "are their engine_id, what they have to do, so that the idlest go first."
        ),
    ] = False
    deployments: Annotated[
        dict[str, str], Meta(description="By pool, the Deployment whose number of pods Scale may change.")
    ] = {}
    leader_worker_sets: Annotated[
        dict[str, str],
        Meta(
            description="By pool of engines of several pods each, the LeaderWorkerSet whose number of groups Scale may change."
        ),
    ] = {}
    stateful_sets: Annotated[
        dict[str, str],
        Meta(
            description="By pool of a data-parallel group, the StatefulSet whose number of pods follows the number of ranks that "
            "Scale asks for."
        ),
    ] = {}
    ranks_per_pod: Annotated[
        dict[str, Annotated[int, Meta(ge=1, le=64)]],
        Meta(description="By pool of stateful_sets, ranks of the group in each pod; 1 for those it does not name."),
    ] = {}
    owners: Annotated[
        dict[str, str],
        Meta(description="By pool, what the number of its engines belongs to, so that Scale is refused."),
    ] = {}
    min_replicas: Annotated[
        dict[str, Annotated[int, Meta(ge=0, le=10_000)]],
        Meta(description="By pool, the fewest engines that Scale may ask for; 0 for those it does not name."),
    ] = {}
    max_replicas: Annotated[
        int, Meta(ge=1, le=10_000, description="Most engines of a pool that Scale may ask for.")
    ] = 100

    def __post_init__(self) -> None:
        check_fields("kubernetes", self)
        workloads = [(name, getattr(self, name)) for name in ("deployments", "leader_worker_sets", "stateful_sets")]
        for (name, pools), (other, others) in itertools.combinations(workloads, 2):
            if twice := pools.keys() & others.keys():
                raise ConfigError(f"kubernetes.{name} and kubernetes.{other} both have pool {min(twice)!r}; it has one")
        if unknown := self.ranks_per_pod.keys() - self.stateful_sets.keys():
            raise ConfigError(f"kubernetes.ranks_per_pod has pool {min(unknown)!r}, which stateful_sets does not have")
        for pool, fewest in self.min_replicas.items():
            if any(pools for _, pools in workloads) and pool not in self.pools:
                known = ", ".join(sorted(self.pools))
                raise ConfigError(
                    f"kubernetes.min_replicas has pool {pool!r}; pools: {known}{nearest(pool, self.pools)}"
                )
            if fewest > self.max_replicas:
                raise ConfigError(
                    f"kubernetes.min_replicas.{pool} is {fewest}; it must not exceed max_replicas = {self.max_replicas}"
                )

    @property
    def enabled(self) -> bool:
        """Whether there is anything to change."""
        return self.deletion_costs or bool(self.deployments or self.leader_worker_sets or self.stateful_sets)

    @property
    def pools(self) -> Set[str]:
        """Those whose number of engines belongs to anybody."""
        owned = self.deployments, self.leader_worker_sets, self.stateful_sets, self.owners
        return {pool for pools in owned for pool in pools}


class LoraNamesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names of LoRA adapters that frontends tell each other through the coordinator."""

    max_registered: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Adapters of a model that have names; more are refused."),
    ] = 4096
    max_model_bytes: Annotated[
        ByteSize,
        Meta(ge=64 * 1024, description="Bytes of memory for the names and paths of a model's adapters."),
    ] = 8 * 1024 * 1024
    max_models: Annotated[
        int,
        Meta(ge=1, le=100_000, description="Models whose adapters have names; adapters of more models are refused."),
    ] = 256
    max_bytes: Annotated[
        ByteSize,
        Meta(ge=64 * 1024, description="Bytes of memory for the names and paths of all models' adapters."),
    ] = 64 * 1024 * 1024
    forget_after: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="Seconds after which the names of a model that has no frontend any more are forgotten; earlier where "
            "other models need the room.",
        ),
    ] = 600.0

    def __post_init__(self) -> None:
        check_fields("lora", self)


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the coordinator needs to know."""

    NEEDS: ClassVar[Needs] = NEEDS
    REMOVED: ClassVar[Mapping[str, str]] = {"wedged_after": ENGINES_DECIDE}

    lease_seconds: Annotated[
        float,
        Meta(ge=0.1, le=3600, description="Seconds without a message from an engine after which it is gone."),
    ] = 5.0
    view_interval: Annotated[
        float,
        Meta(
            ge=0.01,
            le=60,
            description="Seconds between two views of the engines that frontends are sent, where nothing but counts has changed; "
            "more where max_reports_per_second makes engines report less often.",
        ),
    ] = 0.1
    max_reports_per_second: Annotated[
        float,
        Meta(
            ge=1,
            le=1_000_000,
            description="Load reports per second that all engines of a pool may send; in larger pools each reports less often, "
            "and views of them come less often.",
        ),
    ] = 2000.0
    # Engines that served under the coordinator's predecessor may still be on their way back: a view without them would end
    # their requests.
    restart_grace: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=3600,
                description="Seconds after a start in which engines may come back before frontends are sent a view; unset: "
                "one lease.",
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
