"""_checks.tpl: values that are refused because they contradict other values."""

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
        ChartError, match=r"enginecore.pools.spot.tls.secretName and .* must both be set or both be empty"
    ):
        release(POOLS, *settings, "enginecore.pools.spot.tls.secretName=")


def test_an_autoscaler_that_would_count_the_engines_of_other_pools_is_refused():
    with pytest.raises(ChartError, match=r"enginecore.pools.default.autoscaling: .* give the pool another name"):
        release(POOLS, "enginecore.pools.default.autoscaling.mode=hpa")
    scaled = release(POOLS, "enginecore.pools.spot.autoscaling.mode=hpa")
    assert [hpa["metadata"]["name"] for hpa in scaled.all("HorizontalPodAutoscaler")] == [
        "demo-penstock-enginecore-spot"
    ]
    # A LeaderWorkerSet selects only its own pods.
    assert release(MULTINODE).one("HorizontalPodAutoscaler", "enginecore")["spec"]["maxReplicas"] == 4


@pytest.mark.parametrize("key", ["image.tag", "frontend.image.tag", "enginecore.image.tag", "coordinator.image.tag"])
def test_a_tag_that_is_a_number_is_refused_with_how_to_give_it(key: str):
    with pytest.raises(
        ChartError, match=rf"{key} is the number 10, but a tag must be a string; use --set-string {key}=TAG"
    ):
        release(HUB, f"{key}=10")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["proxy.https=http://proxy.example:3128"], r"use port 3128 \(proxy.https is http://proxy.example:3128\)"),
        (["proxy.http=http://proxy.example"], r"use port 80 \(proxy.http is http://proxy.example\)"),
        (["model.hub.endpoint=https://hub.example:8443"], r"use port 8443 \(model.hub.endpoint is"),
    ],
)
def test_a_network_policy_that_would_stop_downloads_is_refused(settings: list[str], said: str):
    with pytest.raises(ChartError, match=said):
        release(HUB, "networkPolicy.enabled=true", *settings)
    port = said.split("port ")[1].split()[0]
    release(HUB, "networkPolicy.enabled=true", f"networkPolicy.hub.port={port}", *settings)
    release(HUB, *settings)


@pytest.mark.parametrize("setting", ["min_prefill_tokens=1024", "overflow=false"])
def test_settings_of_engines_for_prompts_need_such_engines(setting: str):
    key = f"frontend.config.disaggregation.{setting}"
    with pytest.raises(
        ChartError, match=r"frontend.config.disaggregation.\w+ is \w+, which has no effect: it needs a pool with"
    ):
        release(HUB, key)
    release("disaggregated", key)
