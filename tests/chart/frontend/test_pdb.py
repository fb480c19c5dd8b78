"""frontend/pdb.yaml: the number of frontends that a node drain may evict at the same time."""

from tests.chart.rendering import AUTOSCALED, BARE, HUB, release


def test_one_frontend_at_a_time_may_be_evicted():
    spec = release(HUB).one("PodDisruptionBudget", "frontend")["spec"]
    assert spec["maxUnavailable"] == 1
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert spec["selector"] == release(HUB).one("Deployment", "frontend")["spec"]["selector"]


def test_the_number_is_a_value():
    assert release(AUTOSCALED).one("PodDisruptionBudget", "frontend")["spec"]["maxUnavailable"] == "25%"


def test_it_can_be_left_out():
    assert not release(BARE).all("PodDisruptionBudget")
