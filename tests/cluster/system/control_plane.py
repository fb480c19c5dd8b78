"""etcd, the API server, the controllers and the scheduler, in the network namespace of the tests."""

import shutil
import urllib.error
import urllib.request
from pathlib import Path

from tests.cluster.system.addresses import CONTROL_PLANE, SERVICES, SERVICES_V6
from tests.cluster.system.pki import KeyPair, Pki
from tests.cluster.system.programs import Program, built, run
from tests.cluster.tools.components import KUBERNETES

ETCD = "http://127.0.0.1:2379"


class ControlPlane:
    """The control plane of one minor version of Kubernetes. ``directory`` contains its state."""

    def __init__(self, minor: str, pki: Pki, directory: Path) -> None:
        self.version = tuple(int(part) for part in minor.split("."))
        self.server_version = KUBERNETES[minor]
        self._component = f"kubernetes-{minor}"
        self._pki = pki
        self._directory = directory
        self.admin = pki.kubeconfig("admin", user="admin", groups=("system:masters",))
        self.kubectl = (built(self._component, "kubectl"), "--kubeconfig", str(self.admin))
        self.etcd = self._program("etcd", [built("etcd", "etcd"), *self._etcd_flags()])
        self.api_server = self._kubernetes("kube-apiserver", self._api_server_flags())
        self.controllers = self._kubernetes("kube-controller-manager", self._controller_flags())
        self.scheduler = self._kubernetes("kube-scheduler", self._scheduler_flags())

    def start(self) -> None:
        """Start all components, and wait until the API server is ready."""
        shutil.rmtree(self._directory / "etcd", ignore_errors=True)
        self.etcd.start().ready(lambda: _answers(f"{ETCD}/readyz"))
        # The API server is ready only after it has created the rights of the other components, which would exit without
        # them.
        self.api_server.start().ready(self._api_ready)
        self.controllers.start()
        self.scheduler.start()

    def apply(self, manifest: str) -> None:
        """Run ``kubectl apply`` for YAML documents."""
        run(*self.kubectl, "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifest)

    def _api_ready(self) -> bool:
        try:
            run(*self.kubectl, "get", "--raw", "/readyz")
        except Exception:
            return False
        return True

    def _program(self, name: str, command: list[str]) -> Program:
        return Program(name, command, self._directory / f"{name}.log")

    def _kubernetes(self, name: str, flags: dict[str, object]) -> Program:
        return self._program(
            name, [built(self._component, name), *(f"--{flag}={value}" for flag, value in flags.items())]
        )

    def _etcd_flags(self) -> list[str]:
        # No data must survive a test run, so etcd need not sync to disk.
        return [f"--data-dir={self._directory / 'etcd'}", "--unsafe-no-fsync", "--log-level=warn"]

    def _api_server_flags(self) -> dict[str, object]:
        pki = self._pki
        serving, front_proxy = pki.api_server(), pki.front_proxy()
        kubelets = pki.authority.issue("apiserver-kubelet", user="apiserver-kubelet", groups=("system:masters",))
        return {
            "etcd-servers": ETCD,
            "secure-port": 6443,
            "advertise-address": CONTROL_PLANE,
            "service-cluster-ip-range": f"{SERVICES},{SERVICES_V6}",
            "tls-cert-file": serving.certificate,
            "tls-private-key-file": serving.key,
            "client-ca-file": pki.authority.pair.certificate,
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": pki.service_account_key,
            "service-account-signing-key-file": pki.service_account_key,
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
            "kubelet-certificate-authority": pki.authority.pair.certificate,
            "kubelet-client-certificate": kubelets.certificate,
            "kubelet-client-key": kubelets.key,
            "kubelet-preferred-address-types": "InternalIP",
            **_request_headers(pki, front_proxy),
        }

    def _controller_flags(self) -> dict[str, object]:
        config = self._pki.kubeconfig("controllers", user="system:kube-controller-manager")
        return {
            **_kubeconfigs(config),
            "root-ca-file": self._pki.authority.pair.certificate,
            "service-account-private-key-file": self._pki.service_account_key,
            "use-service-account-credentials": "true",
            "horizontal-pod-autoscaler-sync-period": "2s",
            "node-monitor-period": "2s",
            "node-monitor-grace-period": "20s",
        }

    def _scheduler_flags(self) -> dict[str, object]:
        return _kubeconfigs(self._pki.kubeconfig("scheduler", user="system:kube-scheduler"))


def _kubeconfigs(config: Path) -> dict[str, object]:
    flags: dict[str, object] = dict.fromkeys(
        ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"), config
    )
    return {**flags, "leader-elect": "false"}


def _request_headers(pki: Pki, front_proxy: KeyPair) -> dict[str, object]:
    """Return flags for the headers that tell servers of aggregated APIs the user of a forwarded call."""
    return {
        "requestheader-client-ca-file": pki.front_proxy_authority.pair.certificate,
        "requestheader-allowed-names": "front-proxy-client",
        "requestheader-username-headers": "X-Remote-User",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "proxy-client-cert-file": front_proxy.certificate,
        "proxy-client-key-file": front_proxy.key,
        "enable-aggregator-routing": "true",
    }


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
