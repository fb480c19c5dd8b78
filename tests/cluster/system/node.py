"""A node: containerd, kubelet and kube-proxy in separate network, mount, host name and process namespaces."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tests.cluster.system import containerd
from tests.cluster.system.addresses import (
    CLUSTER_DOMAIN,
    CONTROL_PLANE,
    DNS_SERVICE,
    PODS,
    node_address,
    pod_network,
)
from tests.cluster.system.pki import Pki
from tests.cluster.system.programs import Program, built, run, until
from tests.cluster.tools.build import ROOT

# Directories that each node has separately. All other directories are this machine's.
OWN = (
    "/var/lib/kubelet",
    "/var/lib/containerd",
    "/run/containerd",
    "/etc/cdi",
    "/etc/cni",
    "/var/lib/cni",
    "/var/log/pods",
    "/var/log/containers",
)


class Node:
    """Node ``number``, counted from 1. ``directory`` contains the node's state."""

    def __init__(
        self,
        number: int,
        pki: Pki,
        directory: Path,
        *,
        images: Path,
        labels: Mapping[str, str] | None = None,
        taints: tuple[str, ...] = (),
    ) -> None:
        """Args:
        images: Result of :func:`tests.cluster.system.containerd.filled`.
        """
        self.number = number
        self.name = f"node-{number}"
        self.address = node_address(number)
        self.link = f"node{number}"
        self._pki = pki
        self._directory = directory
        self._images = images
        self._labels = dict(labels or {})
        self._taints = taints
        self._holder: subprocess.Popen[bytes] | None = None
        self._init = 0
        self._programs: list[Program] = []

    def start(self, others: list[int]) -> None:
        """Create the namespaces, and start containerd and kube-proxy.

        Args:
            others: Numbers of the other nodes.
        """
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        containerd.copy(self._images, Path(f"{self._directory}/var/lib/containerd"))
        self._enter_namespaces()
        self._connect(others)
        self._write_configs()
        enter = self.enter
        self.containerd = containerd.program(f"{self.name}: containerd", self._directory, enter=enter).start()
        self.proxy = kube_proxy(self.name, self._pki, self._directory, enter=enter).start()
        self.kubelet = Program(
            f"{self.name}: kubelet",
            [built("node", "kubelet"), *self._kubelet_flags()],
            self._directory / "kubelet.log",
            enter=enter,
        )
        self._programs = [self.containerd, self.proxy, self.kubelet]
        self.containerd.ready(lambda: containerd.answers(enter=enter))

    @property
    def enter(self) -> list[str]:
        """Command prefix that runs a command in this node."""
        return ["nsenter", "--target", str(self._init), "--net", "--mount", "--uts", "--pid", "--"]

    def run(self, *command: str) -> str:
        """Run a short command in this node and return its output."""
        return run(*self.enter, *command)

    def import_image(self, archive: Path) -> None:
        """Import the images of an archive into the node's containerd."""
        containerd.import_image(archive, enter=self.enter)

    def offer_gpus(self, **counts: int) -> None:
        """Run a device plugin that offers fake GPUs: ``offer_gpus(**{"nvidia.com/gpu": 4})``."""
        offered = [f"{resource}={count}" for resource, count in counts.items()]
        self.gpus = Program(
            f"{self.name}: device plugin",
            ["env", f"PYTHONPATH={ROOT.parents[1]}", sys.executable, "-m", "tests.cluster.gpus", *offered],
            self._directory / "gpus.log",
            enter=self.enter,
        ).start()
        self._programs.append(self.gpus)
        self.gpus.ready(lambda: len(self.gpus.tail().splitlines()) >= len(counts))

    def offer_claims(self, count: int) -> None:
        """Run the example driver of dynamic resource allocation, which offers ``count`` GPUs in the device class
        gpu.example.com.
        """
        config = self._pki.kubeconfig(f"{self.name}-dra", user=f"system:node:{self.name}", groups=("system:nodes",))
        flags = [f"--node-name={self.name}", f"--num-devices={count}", f"--kubeconfig={config}"]
        driver = Program(
            f"{self.name}: DRA driver",
            [built("dra-driver", "dra-kubeletplugin"), *flags],
            self._directory / "dra.log",
            enter=self.enter,
        ).start()
        self._programs.append(driver)

    def lose(self) -> None:
        """Disconnect the node's network, like pulling its cable."""
        run("ip", "link", "set", self.link, "down")

    def find(self) -> None:
        """Connect the node to the network again, after ``lose``."""
        run("ip", "link", "set", self.link, "up")

    def stop(self) -> None:
        """End all processes of the node, which also ends its namespaces."""
        if self._holder is not None:
            self._holder.send_signal(signal.SIGKILL)
            self._holder.wait()
            self._holder = None
            for program in self._programs:
                program.stop()

    def _enter_namespaces(self) -> None:
        own = " && ".join(
            f"mkdir -p {path} {self._directory}{path} && mount --bind {self._directory}{path} {path}" for path in OWN
        )
        # Lookups of outside names, such as registries, fail immediately, because no name server can be reached.
        names = self._directory / "resolv.conf"
        names.write_text("nameserver 127.0.0.1\n")
        own += f" && mount --bind {names} /etc/resolv.conf"
        script = f"set -e; hostname {self.name}; {own}; mount --make-rshared /; touch {self._directory}/up; exec sleep infinity"
        self._holder = subprocess.Popen(
            [
                "unshare",
                "--net",
                "--mount",
                "--uts",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-c",
                script,
            ]
        )
        up = self._directory / "up"
        until(f"{self.name}: namespaces", up.exists)
        pid = self._holder.pid
        self._init = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _connect(self, others: list[int]) -> None:
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", str(self._init))
        run("ip", "link", "set", self.link, "master", "nodes0", "up")
        run("ip", "route", "add", pod_network(self.number), "via", self.address)
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", CONTROL_PLANE)
        for other in others:
            self.run("ip", "route", "add", pod_network(other), "via", node_address(other))
        for setting in ("net.ipv4.ip_forward=1", "net.ipv4.conf.all.route_localnet=1"):
            self.run("sysctl", "-q", "-w", setting)

    def _write_configs(self) -> None:
        network = Path(f"{self._directory}/etc/cni/net.d")
        network.mkdir(parents=True, exist_ok=True)
        (network / "10-test.conflist").write_text(json.dumps(_cni_config(pod_network(self.number))))
        (self._directory / "kubelet.yaml").write_text(yaml.safe_dump(self._kubelet_config()))

    def _kubelet_flags(self) -> list[str]:
        config = self._pki.kubeconfig(self.name, user=f"system:node:{self.name}", groups=("system:nodes",))
        labels = ",".join(f"{key}={value}" for key, value in self._labels.items())
        return [
            f"--config={self._directory / 'kubelet.yaml'}",
            f"--kubeconfig={config}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            *([f"--node-labels={labels}"] if labels else []),
            *([f"--register-with-taints={','.join(self._taints)}"] if self._taints else []),
        ]

    def _kubelet_config(self) -> dict[str, object]:
        serving = self._pki.authority.issue(f"{self.name}-serving", user=self.name, hosts=(self.name, self.address))
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self._pki.authority.pair.certificate)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(serving.certificate),
            "tlsPrivateKeyFile": str(serving.key),
            "containerRuntimeEndpoint": f"unix://{containerd.SOCKET}",
            "cgroupDriver": "cgroupfs",
            # This machine may have cgroups v1. All nodes use this machine's cgroups.
            "failCgroupV1": False,
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "clusterDNS": [DNS_SERVICE],
            "clusterDomain": CLUSTER_DOMAIN,
            "resolvConf": str(self._directory / "resolv.conf"),
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "nodeStatusUpdateFrequency": "4s",
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
        }


def kube_proxy(name: str, pki: Pki, directory: Path, *, enter: Sequence[str] = ()) -> Program:
    """Return kube-proxy, which implements Service addresses in a network namespace. ``enter``: see :class:`Program`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "kube-proxy.yaml"
    config.write_text(yaml.safe_dump(_proxy_config(name, pki.kubeconfig(f"{name}-proxy", user="system:kube-proxy"))))
    command = [built("node", "kube-proxy"), "--config", str(config), "--v=1"]
    return Program(f"{name}: kube-proxy", command, directory / "kube-proxy.log", enter=enter)


def _cni_config(network: str) -> dict[str, object]:
    # Use point-to-point links instead of a bridge. Then traffic between pods of a node is routed, and answers also pass
    # network policies and the translation of Service addresses.
    return {
        "cniVersion": "1.0.0",
        "name": "test",
        "plugins": [
            {
                "type": "ptp",
                "ipMasq": False,
                "ipam": {"type": "host-local", "ranges": [[{"subnet": network}]], "routes": [{"dst": "0.0.0.0/0"}]},
            }
        ],
    }


def _proxy_config(name: str, kubeconfig: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": name,
        "clusterCIDR": PODS,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "conntrack": {"maxPerCore": 0, "min": 0},
    }
