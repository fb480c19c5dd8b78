"""Enforcement of NetworkPolicies: the firewall of kube-router on every node, while a test needs it."""

import contextlib
import functools
from collections.abc import Iterator

from tests.cluster.system.addresses import SERVICES
from tests.cluster.system.cluster import Cluster
from tests.cluster.system.node import Node
from tests.cluster.system.programs import Program, built

USER = "kube-router"

RIGHTS = f"""
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: {USER}}}
rules:
  - apiGroups: [""]
    resources: [namespaces, pods, services, nodes, endpoints]
    verbs: [get, list, watch]
  - apiGroups: [networking.k8s.io]
    resources: [networkpolicies]
    verbs: [list, watch]
  - apiGroups: [discovery.k8s.io]
    resources: [endpointslices]
    verbs: [list, watch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: {USER}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {USER}}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: {USER}}}]
"""


@contextlib.contextmanager
def firewalls(cluster: Cluster) -> Iterator[None]:
    """Enforce NetworkPolicies on every node while the block runs. A new policy applies after a short delay."""
    cluster.control_plane.apply(RIGHTS)
    programs = {node: _firewall(cluster, node) for node in cluster.nodes}
    try:
        for program in programs.values():
            program.start()
        for program in programs.values():
            program.ready(functools.partial(_has_rules, program))
        yield
    finally:
        for node, program in programs.items():
            program.stop()
            # No other program on the node uses iptables. The rules of Services are in nftables.
            node.run("iptables", "--table=filter", "--flush")
            node.run("iptables", "--table=filter", "--delete-chain")
            node.run("ipset", "destroy")


def _firewall(cluster: Cluster, node: Node) -> Program:
    command = [
        built("kube-router", "kube-router"),
        f"--kubeconfig={cluster.pki.kubeconfig(f'{node.name}-{USER}', user=USER)}",
        f"--hostname-override={node.name}",
        f"--service-cluster-ip-range={SERVICES}",
        "--run-firewall=true",
        "--run-router=false",
        "--run-service-proxy=false",
        "--health-port=0",
        "--iptables-sync-period=10s",
        "--v=1",
    ]
    log = cluster.directory / node.name / "kube-router.log"
    log.unlink(missing_ok=True)  # remove the log of an earlier firewall, which already says that the rules are in place
    return Program(f"{node.name}: kube-router", command, log, enter=node.enter)


def _has_rules(program: Program) -> bool:
    return "sync iptables took" in program.log.read_text()
