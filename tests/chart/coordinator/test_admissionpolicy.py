"""coordinator/admissionpolicy.yaml: the limits of the coordinator's right to patch pods."""

from tests.chart.rendering import AUTOSCALED, HUB, release


def test_of_pods_it_may_change_one_annotation_alone():
    rendered = release(AUTOSCALED)
    [policy] = rendered.all("ValidatingAdmissionPolicy")
    [binding] = rendered.all("ValidatingAdmissionPolicyBinding")
    assert policy["metadata"]["name"].startswith("serving-")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    account = rendered.one("ServiceAccount", "coordinator")["metadata"]["name"]
    [condition] = policy["spec"]["matchConditions"]
    assert condition["expression"] == f"request.userInfo.username == 'system:serviceaccount:serving:{account}'"
    text = " ".join(validation["expression"] for validation in policy["spec"]["validations"])
    assert "object.spec == oldObject.spec" in text
    assert "variables.labels[?'app.kubernetes.io/component'].orValue('') == 'enginecore'" in text
    assert text.count("controller.kubernetes.io/pod-deletion-cost") == 3


def test_without_rights_there_is_no_policy():
    assert release(HUB).all("ValidatingAdmissionPolicy") == []
    assert release(AUTOSCALED, "coordinator.kubernetes.admissionPolicy=false").all("ValidatingAdmissionPolicy") == []
