"""coordinator/rbac.yaml: the coordinator's account has rights only for objects that the coordinator changes."""

from tests.chart.rendering import AUTOSCALED, GROUPS, HUB, MULTINODE, POOLS, release

KINDS = ("ServiceAccount", "Role", "RoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
SCALE = "coordinator.kubernetes.scale=true"


def rules(rendered):
    return rendered.one("Role", "coordinator")["rules"]


def test_a_coordinator_that_changes_nothing_has_no_account():
    rendered = release(HUB)
    assert [kind for kind in KINDS if rendered.all(kind)] == []
    assert rendered.pod_spec("coordinator")["automountServiceAccountToken"] is False
    assert rendered.config("coordinator")["kubernetes"] == {"deletion_costs": False, "deployments": {}, "owners": {}}


def test_where_engines_are_scaled_it_may_patch_pods():
    rendered = release(AUTOSCALED)
    assert rules(rendered) == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    spec = rendered.pod_spec("coordinator")
    account = rendered.one("ServiceAccount", "coordinator")["metadata"]["name"]
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == (account, True)
    assert rendered.pod_spec("enginecore")["serviceAccountName"] == "penstock"
    assert rendered.pod_spec("enginecore")["automountServiceAccountToken"] is False
    [subject] = rendered.one("RoleBinding", "coordinator")["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": account, "namespace": "serving"}
    owner = f"HorizontalPodAutoscaler {rendered.one('HorizontalPodAutoscaler', 'enginecore')['metadata']['name']}"
    assert rendered.config("coordinator")["kubernetes"] == {
        "deletion_costs": True,
        "deployments": {},
        "owners": {"default": owner},
    }


def test_operators_scale_the_deployments_of_the_release_and_no_others():
    rendered = release(POOLS, SCALE, "enginecore.pools.spot.autoscaling.mode=keda")
    deployments = rendered.config("coordinator")["kubernetes"]["deployments"]
    assert "spot" not in deployments
    assert {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["get", "patch"]}.items() <= rules(
        rendered
    )[1].items()
    assert rules(rendered)[1]["resourceNames"] == sorted(deployments.values())


def test_operators_scale_engines_of_several_pods_by_their_groups():
    mode = "enginecore.pools.default.autoscaling"
    rendered = release(MULTINODE, SCALE, f"{mode}.mode=none", f"{mode}.minReplicas=1")
    config = rendered.config("coordinator")["kubernetes"]
    groups = {"default": "demo-penstock-enginecore", "wide": "demo-penstock-enginecore-wide"}
    assert config["leader_worker_sets"] == groups
    assert config["deployments"] == {"one": "demo-penstock-enginecore-one"}
    assert rules(rendered)[2] == {
        "apiGroups": ["leaderworkerset.x-k8s.io"],
        "resources": ["leaderworkersets/scale"],
        "resourceNames": sorted(groups.values()),
        "verbs": ["get", "patch"],
    }


def test_pods_of_groups_follow_their_ranks():
    config = release(GROUPS).config("coordinator")["kubernetes"]
    sets = {"default": "demo-penstock-enginecore", "wide": "demo-penstock-enginecore-wide"}
    assert config == {
        "deletion_costs": False,
        "deployments": {},
        "owners": {},
        "stateful_sets": sets,
        "ranks_per_pod": {"default": 1, "wide": 2},
    }
    assert rules(release(GROUPS)) == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": sorted(sets.values()),
            "verbs": ["get", "patch"],
        }
    ]
    left_to_the_chart = release(GROUPS, "coordinator.kubernetes.scale=false")
    assert left_to_the_chart.all("Role") == []


def test_what_engines_of_several_pods_cost_to_remove_is_nothing_to_anybody():
    """Checks that there are no deletion costs, because a LeaderWorkerSet always removes its last groups first."""
    autoscaled = release(MULTINODE)
    assert autoscaled.config("coordinator")["kubernetes"]["deletion_costs"] is False
    assert autoscaled.all("Role") == autoscaled.all("ValidatingAdmissionPolicy") == []
    by_hand = release(HUB, SCALE, "enginecore.multiNode.size=2", "enginecore.pipelineParallelSize=2")
    assert [rule["resources"] for rule in rules(by_hand)] == [["leaderworkersets/scale"]]


def test_operators_have_bounds():
    bounds = ("coordinator.config.kubernetes.min_replicas.default=1", "coordinator.config.kubernetes.max_replicas=9")
    config = release(HUB, SCALE, *bounds).config("coordinator")["kubernetes"]
    assert (config["min_replicas"], config["max_replicas"]) == ({"default": 1}, 9)
    assert config["deployments"].keys() == {"default"}


def test_each_right_can_be_left_out():
    without_costs = release(HUB, SCALE, "coordinator.kubernetes.deletionCosts=false")
    assert [rule["resources"] for rule in rules(without_costs)] == [["deployments/scale"]]
    assert without_costs.all("ValidatingAdmissionPolicy") == []
    without_policy = release(AUTOSCALED, "coordinator.kubernetes.admissionPolicy=false")
    assert without_policy.all("ValidatingAdmissionPolicy") == []
    assert release(AUTOSCALED, "coordinator.kubernetes.deletionCosts=false").all("Role") == []
