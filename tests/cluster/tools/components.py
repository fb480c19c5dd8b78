"""Go programs of the test cluster. Each program is built in its own version, from its published module."""

from dataclasses import dataclass, field

# The newest version is the default, and each version can run as the control plane. Programs on nodes have the oldest
# version: a kubelet may be up to three minor versions older than its API server, and never newer.
KUBERNETES = {"1.37": "v1.37.2", "1.36": "v1.36.3", "1.35": "v1.35.4"}
NEWEST = "1.37"
OLDEST = "1.35"


@dataclass(frozen=True)
class OwnModule:
    """A Go module with files from this repository.

    Attributes:
        files: Go source by path. The files replace those of the published ``version``, if a version is set.
    """

    files: dict[str, str]
    version: str = ""


@dataclass(frozen=True)
class Component:
    """Programs that are built together, because they use the same list of modules.

    Attributes:
        packages: Import path by the name of the program.
        tags: Go build tags.
        variables: Values that the linker sets, by import path and name.
        replaced: Replacements of modules, each as ``PATH VERSION``.
        own: Replacements of modules, with files from this repository.
        staging: Whether the module requires Kubernetes's modules at v0.0.0, which exist only in Kubernetes's tree.
    """

    module: str
    version: str
    packages: dict[str, str]
    tags: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    staging: bool = False
    copies_replaces: bool = False
    replaced: dict[str, str] = field(default_factory=dict, repr=False)
    own: dict[str, OwnModule] = field(default_factory=dict, repr=False)

    @property
    def recipe(self) -> str:
        """Text that changes with every input of the programs' build."""
        return "".join(map(repr, filter(None, [self, self.replaced, self.own])))


def kubernetes(minor: str, programs: tuple[str, ...]) -> Component:
    """Return the programs of Kubernetes ``minor``, a key of :data:`KUBERNETES`. The programs contain a version number,
    because helm requires one.
    """
    version = KUBERNETES[minor]
    return Component(
        module="k8s.io/kubernetes",
        version=version,
        packages={program: f"k8s.io/kubernetes/cmd/{program}" for program in programs},
        tags=("providerless",),
        variables={
            "k8s.io/component-base/version.gitVersion": version,
            "k8s.io/component-base/version.gitMajor": minor.split(".")[0],
            "k8s.io/component-base/version.gitMinor": minor.split(".")[1],
            "k8s.io/component-base/version.gitTreeState": "clean",
            "k8s.io/client-go/pkg/version.gitVersion": version,
        },
        staging=True,
    )


CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE = ("kubelet", "kube-proxy")

# Settings of Traefik's commercial builds. In Traefik's tree, this unpublished module is empty.
TRAEFIK_EXTENSIONS = """package ext

type HTTP struct{}

type Router struct{}
"""

# Replaces the DNS providers for ACME certificates. A hundred providers would need a hundred modules.
NO_DNS_PROVIDERS = """package dns

import (
	"fmt"

	"github.com/go-acme/lego/v5/challenge"
)

func NewDNSChallengeProviderByName(name string) (challenge.Provider, error) {
	return nil, fmt.Errorf("%s: built without DNS providers", name)
}
"""

READ = {
    "k8s.io/kubelet": KUBERNETES[OLDEST].replace("v1.", "v0.", 1),
    "sigs.k8s.io/gateway-api": "v1.6.0",
    "github.com/cert-manager/cert-manager": "v1.19.1",
    "github.com/prometheus-operator/prometheus-operator": "v0.92.1",
    "sigs.k8s.io/lws": "v0.9.0",
}
"""Modules, with versions, of which tests read files without network access. No programs are built from them."""

COMPONENTS: dict[str, Component] = {
    **{f"kubernetes-{minor}": kubernetes(minor, CONTROL_PLANE) for minor in KUBERNETES},
    "node": kubernetes(OLDEST, NODE),
    "etcd": Component("go.etcd.io/etcd/server/v3", "v3.7.3", {"etcd": "go.etcd.io/etcd/server/v3"}),
    "containerd": Component(
        "github.com/containerd/containerd/v2",
        "v2.4.2",
        {
            name: f"github.com/containerd/containerd/v2/cmd/{name}"
            for name in ("containerd", "containerd-shim-runc-v2", "ctr")
        },
        tags=("no_btrfs", "no_zfs", "no_devmapper", "no_aufs"),
    ),
    "cni": Component(
        "github.com/containernetworking/plugins",
        "v1.9.1",
        {
            **{
                name: f"github.com/containernetworking/plugins/plugins/main/{name}"
                for name in ("bridge", "loopback", "ptp")
            },
            "host-local": "github.com/containernetworking/plugins/plugins/ipam/host-local",
            "portmap": "github.com/containernetworking/plugins/plugins/meta/portmap",
        },
    ),
    "coredns": Component(
        "github.com/coredns/coredns", "v1.15.0", {"coredns": "github.com/coredns/coredns"}, copies_replaces=True
    ),
    "helm-4": Component(
        "helm.sh/helm/v4",
        "v4.3.1",
        {"helm": "helm.sh/helm/v4/cmd/helm"},
        variables={"helm.sh/helm/v4/internal/version.version": "v4.3.1"},
    ),
    "prometheus": Component(
        "github.com/prometheus/prometheus",
        "v0.316.0",
        {name: f"github.com/prometheus/prometheus/cmd/{name}" for name in ("prometheus", "promtool")},
        tags=("netgo", "remove_all_sd", "enable_kubernetes_sd"),
    ),
    "prometheus-adapter": Component(
        "sigs.k8s.io/prometheus-adapter",
        "v0.12.0",
        {"prometheus-adapter": "sigs.k8s.io/prometheus-adapter/cmd/adapter"},
        copies_replaces=True,
    ),
    "keda": Component(
        "github.com/kedacore/keda/v2",
        "v2.20.2",
        {
            "keda-operator": "github.com/kedacore/keda/v2/cmd/operator",
            "keda-adapter": "github.com/kedacore/keda/v2/cmd/adapter",
        },
        copies_replaces=True,
    ),
    "dra-driver": Component(
        "sigs.k8s.io/dra-example-driver",
        "v0.2.1",
        {"dra-kubeletplugin": "sigs.k8s.io/dra-example-driver/cmd/dra-example-kubeletplugin"},
    ),
    "endpoint-picker": Component(
        "sigs.k8s.io/gateway-api-inference-extension",
        "v1.5.0",
        {"epp": "sigs.k8s.io/gateway-api-inference-extension/cmd/epp"},
    ),
    "grpcurl": Component(
        "github.com/fullstorydev/grpcurl", "v1.9.3", {"grpcurl": "github.com/fullstorydev/grpcurl/cmd/grpcurl"}
    ),
    "ghz": Component("github.com/bojand/ghz", "v0.121.0", {"ghz": "github.com/bojand/ghz/cmd/ghz"}),
    "kube-router": Component(
        "github.com/cloudnativelabs/kube-router/v2",
        "v2.2.1",
        {"kube-router": "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"},
        replaced={"github.com/cloudnativelabs/kube-router/v2": "github.com/k3s-io/kube-router/v2 v2.2.1"},
    ),
    "traefik": Component(
        "github.com/traefik/traefik/v3",
        "v3.7.13",
        {"traefik": "github.com/traefik/traefik/v3/cmd/traefik"},
        copies_replaces=True,
        # Not all module proxies have the revision that its go.mod requires.
        replaced={
            "github.com/abbot/go-http-auth": "github.com/containous/go-http-auth v0.4.1-0.20200324110947-a37a7636d23e"
        },
        own={
            "github.com/traefik/traefik/dynamic/ext": OwnModule({"ext.go": TRAEFIK_EXTENSIONS}),
            "github.com/go-acme/lego/v5": OwnModule(
                {"providers/dns/zz_gen_dns_providers.go": NO_DNS_PROVIDERS}, version="v5.4.1"
            ),
        },
    ),
}
