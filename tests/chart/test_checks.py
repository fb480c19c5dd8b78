"""_checks.tpl: what is refused because of other values."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import HUB, MULTINODE, POOLS, release


def test_a_grace_period_that_would_cut_the_drain_short_is_refused():
    enough = release(HUB, "enginecore.preStopSleepSeconds=4", "enginecore.terminationGracePeriodSeconds=125")
    assert enough.pod_spec("enginecore")["terminationGracePeriodSeconds"] == 125
    with pytest.raises(ChartError, match=r"enginecore.terminationGracePeriodSeconds is 124; it must exceed .* = 124"):
        release(HUB, "enginecore.preStopSleepSeconds=4", "enginecore.terminationGracePeriodSeconds=124")
    with pytest.raises(ChartError, match=r"frontend.terminationGracePeriodSeconds is 330; it must exceed .* = 330"):
        release(HUB, "frontend.drainTimeoutSeconds=320")


def test_a_drain_that_ends_before_clients_have_been_moved_is_refused():
    with pytest.raises(ChartError, match=r"frontend.drainTimeoutSeconds is 133; it must be at least 134, .* = 120"):
        release(HUB, "frontend.drainTimeoutSeconds=133")
    release(HUB, "frontend.drainTimeoutSeconds=134")
    age = "frontend.config.server.max_connection_age"
    with pytest.raises(ChartError, match=r"frontend.drainTimeoutSeconds is 300; it must be at least 332, .* = 300"):
        release(HUB, f"{age}=300")
    release(HUB, f"{age}=20", "frontend.drainTimeoutSeconds=24")
    release(HUB, f"{age}=0", "frontend.drainTimeoutSeconds=1")


def test_an_empty_autoscaling_range_is_refused_in_every_pool():
    settings = ("autoscaling.mode=hpa", "autoscaling.minReplicas=17", "autoscaling.maxReplicas=16")
    for key in ("enginecore", "enginecore.pools.spot"):
        with pytest.raises(
            ChartError, match=rf"{key}.autoscaling.minReplicas is 17; it must not exceed maxReplicas = 16"
        ):
            release(HUB, *(f"{key}.{setting}" for setting in settings))


def test_certificates_are_for_the_engines_of_all_pools():
    settings = [f"{component}.tls.secretName=of-{component}" for component in ("frontend", "enginecore", "coordinator")]
    own = release(POOLS, *settings, "enginecore.pools.spot.tls.secretName=of-spot")
    assert own.volumes("enginecore-spot")["tls"]["secret"]["secretName"] == "of-spot"
    with pytest.raises(
        ChartError, match=r"enginecore.pools.spot.tls.secretName: all engines have certificates, or none"
    ):
        release(POOLS, *settings, "enginecore.pools.spot.tls.secretName=")


def test_an_autoscaler_that_would_count_the_engines_of_other_pools_is_refused():
    with pytest.raises(ChartError, match=r"enginecore.pools.default.autoscaling: .* give the pool another name"):
        release(POOLS, "enginecore.pools.default.autoscaling.mode=hpa")
    scaled = release(POOLS, "enginecore.pools.spot.autoscaling.mode=hpa")
    assert [hpa["metadata"]["name"] for hpa in scaled.all("HorizontalPodAutoscaler")] == [
        "demo-penstock-enginecore-spot"
    ]
    # A LeaderWorkerSet selects nothing but its own.
    assert release(MULTINODE).one("HorizontalPodAutoscaler", "enginecore")["spec"]["maxReplicas"] == 4
