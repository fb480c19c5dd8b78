"""Autoscaling by metrics: Prometheus, the adapter that serves Prometheus's series to the HPA, and KEDA. Tests install
them on demand.
"""

from typing import Any

import yaml

from tests.cluster.system.cluster import Cluster
from tests.cluster.system.programs import run
from tests.cluster.tools.build import download
from tests.cluster.tools.components import COMPONENTS

NAMESPACE = "monitoring"
PROMETHEUS_IMAGE = "penstock.test/prometheus:1"
ADAPTER_IMAGE = "penstock.test/prometheus-adapter:1"
KEDA_IMAGES = {"/keda": "penstock.test/keda:1", "/keda-adapter": "penstock.test/keda-adapter:1"}

SCRAPES = """
global: {scrape_interval: 1s, evaluation_interval: 1s}
scrape_configs:
  - job_name: pods
    kubernetes_sd_configs: [{role: pod}]
    relabel_configs:
      - {source_labels: [__meta_kubernetes_pod_annotation_prometheus_io_scrape], regex: "true", action: keep}
      - {source_labels: [__meta_kubernetes_pod_container_init], regex: "true", action: drop}
      - source_labels: [__meta_kubernetes_pod_ip, __meta_kubernetes_pod_annotation_prometheus_io_port]
        regex: (.+);(.+)
        target_label: __address__
        replacement: $1:$2
      - {source_labels: [__meta_kubernetes_namespace], target_label: namespace}
      - {source_labels: [__meta_kubernetes_pod_name], target_label: pod}
"""

# Adapter rules from the chart's README.
ADAPTER_RULES = """
rules:
  - seriesQuery: '{__name__="penstock:load",namespace!="",pod!=""}'
    resources: {overrides: {namespace: {resource: namespace}, pod: {resource: pod}}}
    name: {as: penstock_load}
    metricsQuery: sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)
  - seriesQuery: '{__name__="vllm:kv_cache_usage_perc",namespace!="",pod!=""}'
    resources: {overrides: {namespace: {resource: namespace}, pod: {resource: pod}}}
    name: {as: vllm_kv_cache_usage_perc}
    metricsQuery: sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)
externalRules:
  - seriesQuery: '{__name__=~"penstock_coordinator_pool_(load|kv_cache_usage)",namespace!=""}'
    resources: {overrides: {namespace: {resource: namespace}}}
    metricsQuery: sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)
"""


def install_prometheus(cluster: Cluster) -> None:
    """Install a Prometheus that scrapes every pod with the usual annotations each second:
    ``prometheus.monitoring:9090``.
    """
    cluster.import_program("prometheus", "prometheus", PROMETHEUS_IMAGE)
    rules = [{"apiGroups": [""], "resources": ["pods", "services", "endpoints"], "verbs": ["get", "list", "watch"]}]
    arguments = ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/tmp/data"]
    _apply(
        cluster,
        _namespace(NAMESPACE),
        *_account("prometheus", rules),
        _config_map("prometheus", {"prometheus.yml": SCRAPES}),
        _deployment("prometheus", PROMETHEUS_IMAGE, arguments, "/etc/prometheus", {"path": "/-/ready", "port": 9090}),
        _service("prometheus", 9090, 9090),
    )
    _rolled_out(cluster, NAMESPACE, "prometheus")


def install_adapter(cluster: Cluster) -> None:
    """Install prometheus-adapter.

    The adapter serves ``custom.metrics.k8s.io``. It also serves ``external.metrics.k8s.io`` until KEDA is installed.
    """
    cluster.import_program("prometheus-adapter", "prometheus-adapter", ADAPTER_IMAGE)
    rules = [{"apiGroups": [""], "resources": ["pods", "namespaces", "configmaps"], "verbs": ["get", "list", "watch"]}]
    arguments = [
        f"--prometheus-url=http://prometheus.{NAMESPACE}.svc:9090",
        "--config=/etc/adapter/config.yaml",
        "--metrics-relist-interval=5s",
        "--metrics-max-age=15s",
        "--secure-port=6443",
        "--cert-dir=/tmp/certificates",
    ]
    probe = {"path": "/readyz", "port": 6443, "scheme": "HTTPS"}
    _apply(
        cluster,
        *_account("prometheus-adapter", rules),
        *_aggregated("prometheus-adapter", ("v1beta1", "v1beta2"), "custom.metrics.k8s.io"),
        *_aggregated("prometheus-adapter", ("v1beta1",), "external.metrics.k8s.io"),
        _config_map("prometheus-adapter", {"config.yaml": ADAPTER_RULES}),
        _deployment("prometheus-adapter", ADAPTER_IMAGE, arguments, "/etc/adapter", probe),
        _service("prometheus-adapter", 443, 6443),
    )
    _rolled_out(cluster, NAMESPACE, "prometheus-adapter")


def install_keda(cluster: Cluster) -> None:
    """Install KEDA's operator and metrics server from KEDA's manifests, without the webhooks."""
    for program, image in (("keda-operator", "/keda"), ("keda-adapter", "/keda-adapter")):
        cluster.import_program("keda", program, KEDA_IMAGES[image], path=image)
    component = COMPONENTS["keda"]
    manifests = run(
        cluster.control_plane.kubectl[0],
        "kustomize",
        str(download(component.module, component.version) / "config/default"),
    )
    kept = []
    for each in yaml.safe_load_all(manifests):
        if each["kind"] == "ValidatingWebhookConfiguration" or each["metadata"]["name"] == "keda-admission":
            continue
        if each["kind"] == "Deployment":
            for container in each["spec"]["template"]["spec"]["containers"]:
                container.update(image=KEDA_IMAGES[container["command"][0]], imagePullPolicy="Never")
        kept.append(each)
    _apply(cluster, *kept)
    for name in ("keda-operator", "keda-metrics-apiserver"):
        _rolled_out(cluster, "keda", name)


def _apply(cluster: Cluster, *objects: dict[str, Any]) -> None:
    cluster.control_plane.apply(yaml.safe_dump_all(objects))


def _rolled_out(cluster: Cluster, namespace: str, name: str) -> None:
    cluster.kubectl("--namespace", namespace, "rollout", "status", f"deployment/{name}", "--timeout=180s")


def _namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def _account(name: str, rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    subject = {"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}
    rbac = "rbac.authorization.k8s.io"
    role = {"apiGroup": rbac, "kind": "ClusterRole", "name": name}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": NAMESPACE}},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": role,
            "subjects": [subject],
        },
    ]


def _aggregated(name: str, versions: tuple[str, ...], group: str) -> list[dict[str, Any]]:
    subject = {"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}
    rbac = "rbac.authorization.k8s.io"
    return [
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": f"{name}-auth-delegator"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "system:auth-delegator"},
            "subjects": [subject],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": f"{name}-auth-reader", "namespace": "kube-system"},
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "extension-apiserver-authentication-reader"},
            "subjects": [subject],
        },
        *(
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": f"{version}.{group}"},
                "spec": {
                    "group": group,
                    "version": version,
                    "service": {"name": name, "namespace": NAMESPACE},
                    "insecureSkipTLSVerify": True,
                    "groupPriorityMinimum": 100,
                    "versionPriority": 100,
                },
            }
            for version in versions
        ),
    ]


def _config_map(name: str, data: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": NAMESPACE}, "data": data}


def _service(name: str, port: int, target: int) -> dict[str, Any]:
    ports = [{"port": port, "targetPort": target}]
    metadata = {"name": name, "namespace": NAMESPACE}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": {"app": name}, "ports": ports},
    }


def _deployment(name: str, image: str, arguments: list[str], config: str, probe: dict[str, Any]) -> dict[str, Any]:
    container = {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "args": arguments,
        "volumeMounts": [{"name": "config", "mountPath": config}, {"name": "tmp", "mountPath": "/tmp"}],
        "readinessProbe": {"httpGet": probe, "periodSeconds": 1},
    }
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "tmp", "emptyDir": {}},
    ]
    pod = {
        "metadata": {"labels": {"app": name}},
        "spec": {"serviceAccountName": name, "containers": [container], "volumes": volumes},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"selector": {"matchLabels": {"app": name}}, "template": pod},
    }
