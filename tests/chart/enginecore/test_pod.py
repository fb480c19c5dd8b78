"""enginecore/_pod.tpl: pods of engines, and pods of engines' workers on other nodes."""

from tests.chart.rendering import HUB, MULTINODE, WORKER, release

WIDE, OTHERS = "enginecore-wide", f"enginecore-wide{WORKER}"


def test_an_engine_of_several_pods_is_otherwise_the_pod_that_it_was():
    leader, one = release(MULTINODE).container(WIDE), release(MULTINODE).container("enginecore-one")
    for part in ("args", "image", "startupProbe", "readinessProbe", "livenessProbe", "securityContext"):
        assert leader[part] == one[part]
    ports = {port["name"]: port["containerPort"] for port in leader["ports"]}
    assert ports == {"grpc": 50052, "metrics": 9100, "nodes": 50061}
    assert "nodes" not in [port["name"] for port in release(HUB).container("enginecore")["ports"]]


def test_a_worker_runs_the_worker_command_of_the_same_image_with_the_same_files():
    leader, worker = release(MULTINODE).container(WIDE), release(MULTINODE).container(OTHERS)
    assert worker["args"] == ["worker", *leader["args"]]
    for part in ("image", "resources", "volumeMounts", "securityContext"):
        assert worker[part] == leader[part]
    assert release(MULTINODE).volumes(OTHERS) == release(MULTINODE).volumes(WIDE)
    assert release(MULTINODE).pod_spec(OTHERS)["tolerations"] == release(MULTINODE).pod_spec(WIDE)["tolerations"]


def test_a_worker_serves_nobody_and_registers_nowhere():
    worker = release(MULTINODE).container(OTHERS)
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} & worker.keys()
    assert "PENSTOCK_COORDINATOR__ADVERTISE" not in release(MULTINODE).env(OTHERS)
    assert release(MULTINODE).env(OTHERS)["PENSTOCK_ENGINE_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    annotations = release(MULTINODE, "metrics.podMonitor.enabled=false").pod(OTHERS)["metadata"]["annotations"]
    assert list(annotations) == ["checksum/config"]


def test_a_worker_is_no_engine_to_what_selects_engines():
    rendered = release(MULTINODE)
    assert rendered.pod(WIDE)["metadata"]["labels"]["app.kubernetes.io/component"] == "enginecore"
    labels = rendered.pod(OTHERS)["metadata"]["labels"]
    assert (labels["app.kubernetes.io/component"], labels["penstock.io/pool"]) == ("enginecore-worker", "wide")
    for kind, selector in (("PodMonitor", "selector"), ("Deployment", "selector")):
        for manifest in rendered.all(kind):
            assert not manifest["spec"][selector]["matchLabels"].items() <= labels.items()


def test_a_worker_outlives_the_drain_of_its_engine():
    """Covers evictions in which a worker's pod gets SIGTERM before its engine's pod."""
    for component in (WIDE, OTHERS):
        pod = release(MULTINODE, "enginecore.terminationGracePeriodSeconds=300").pod_spec(component)
        assert pod["terminationGracePeriodSeconds"] == 300


def test_pods_of_a_group_are_spread_among_those_of_their_kind_and_revision():
    for component, kind in ((WIDE, "enginecore"), (OTHERS, "enginecore-worker")):
        (spread,) = release(MULTINODE).pod_spec(component)["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == kind
        assert spread["matchLabelKeys"] == ["leaderworkerset.sigs.k8s.io/template-revision-hash"]
    (spread,) = release(HUB).pod_spec("enginecore")["topologySpreadConstraints"]
    assert spread["matchLabelKeys"] == ["pod-template-hash"]


def test_each_pod_of_an_engine_claims_its_own_gpus():
    claimed = release(MULTINODE, "enginecore.gpu.dra.deviceClassName=gpu.nvidia.com", kube_version="1.36")
    claims = {c: claimed.pod_spec(c)["resourceClaims"] for c in (WIDE, OTHERS)}
    assert claims[WIDE] == claims[OTHERS]
    name = claims[WIDE][0]["resourceClaimTemplateName"]
    (template,) = [t for t in claimed.all("ResourceClaimTemplate") if t["metadata"]["name"] == name]
    assert template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] == 8
    assert claimed.container(OTHERS)["resources"]["claims"] == [{"name": "gpu"}]
