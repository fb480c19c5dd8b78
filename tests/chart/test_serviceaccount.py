"""serviceaccount.yaml: an account for the pods, which is rendered only if enabled."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import AUTOSCALED, FETCHED, HUB, SERVICES, release


def test_the_account_has_what_a_cloud_knows_it_by():
    (account,) = release(FETCHED).all("ServiceAccount")
    assert account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].endswith("role/models")
    assert account["automountServiceAccountToken"] is False
    names = {release(FETCHED).pod_spec(component)["serviceAccountName"] for component in SERVICES}
    assert names == {account["metadata"]["name"]}


def test_without_one_the_pods_have_that_of_the_values_or_of_the_namespace():
    assert not release(HUB).all("ServiceAccount")
    (own,) = release(AUTOSCALED).all("ServiceAccount")  # the coordinator's account, which has rights
    assert own["metadata"]["labels"]["app.kubernetes.io/component"] == "coordinator"
    assert release(AUTOSCALED).pod_spec("enginecore")["serviceAccountName"] == "penstock"
    assert "serviceAccountName" not in release(HUB).pod_spec("enginecore")


def test_two_accounts_are_refused():
    with pytest.raises(ChartError, match="serviceAccount.create and serviceAccountName are both set"):
        release(AUTOSCALED, "serviceAccount.create=true")
