"""Settings of a coordinator that have an effect only together with another one."""

from penstock_common.config.needs import Need, Needs, on
from penstock_common.config.shared_needs import OF_ALL

NEEDS: Needs = (
    *OF_ALL,
    Need(("peers.",), (on("server.tls.ca"),)),
    Need(("kubernetes.ranks_per_pod",), (on("kubernetes.stateful_sets"),)),
    Need(
        ("kubernetes.min_replicas", "kubernetes.max_replicas"),
        (on("kubernetes.deployments"), on("kubernetes.leader_worker_sets"), on("kubernetes.stateful_sets")),
    ),
)
