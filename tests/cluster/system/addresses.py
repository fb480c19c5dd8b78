"""Addresses of all parts of the cluster. They exist only in network namespaces that the cluster creates."""

CLUSTER_DOMAIN = "cluster.local"
SERVICES = "10.79.0.0/16"
SERVICES_V6 = "fd79::/112"
"""IPv6 addresses that Services may have. No traffic reaches them, because nodes and pods have only IPv4 addresses."""
PODS = "10.78.0.0/16"

# Address of the bridge between the nodes, on the control plane's host.
CONTROL_PLANE = "10.77.0.1"
API_SERVICE = "10.79.0.1"
DNS_SERVICE = "10.79.0.10"


def node_address(number: int) -> str:
    """Return the address of node ``number``, counted from 1."""
    return f"10.77.0.{10 + number}"


def pod_network(number: int) -> str:
    """Return the network from which node ``number`` assigns addresses to its pods."""
    return f"10.78.{number}.0/24"
