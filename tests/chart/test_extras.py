"""_extras.tpl: the user's additions to the pods, and conflicts with names that the chart uses."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import AUTOSCALED, FETCHED, HUB, SERVICES, release


def test_extra_environment_is_added():
    assert release(AUTOSCALED).env("frontend")["EXAMPLE"]["value"] == "http://proxy.example:3128"
    assert "valueFrom" in release(AUTOSCALED).env("enginecore")["NCCL_DEBUG"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("PENSTOCK_LOG__LEVEL", "which is a setting of the service; set it in enginecore.config"),
        ("HF_HOME", "which the chart sets"),
        ("TRITON_CACHE_DIR", "which the chart sets"),
    ],
)
def test_extra_environment_cannot_override_what_the_chart_sets(name: str, message: str):
    with pytest.raises(ChartError, match=rf"enginecore.extraEnv has {name}, {message}"):
        release(HUB, f"enginecore.extraEnv[0].name={name}", "enginecore.extraEnv[0].value=x")


@pytest.mark.parametrize("component", SERVICES)
def test_every_variable_of_a_container_is_one_that_cannot_be_set_twice(component: str):
    for variable in release(HUB).env(component).keys() - {"PENSTOCK_COORDINATOR__ADVERTISE", "PENSTOCK_ENGINE_ID"}:
        with pytest.raises(ChartError, match=rf"{component}.extraEnv has {variable}, which the chart sets"):
            release(HUB, f"{component}.extraEnv[0].name={variable}", f"{component}.extraEnv[0].value=x")


@pytest.mark.parametrize("component", SERVICES)
def test_volumes_are_added_and_mounted(component: str):
    rendered = release(FETCHED)
    assert rendered.volumes(component)["trusted"]["configMap"] == {"name": "authorities"}
    assert rendered.mounts(component)["/etc/ssl/trusted"] == {
        "name": "trusted",
        "mountPath": "/etc/ssl/trusted",
        "readOnly": True,
    }
    assert "trusted" not in release(HUB).volumes(component)


def test_sidecars_start_first_and_stop_last():
    proxy = release(FETCHED).before("frontend")["proxy"]
    assert proxy["restartPolicy"] == "Always"
    assert proxy["ports"] == [{"name": "proxy", "containerPort": 3128}]
    assert list(release(FETCHED).before("frontend")) == ["proxy", "fetch"]


def test_init_containers_end():
    assert list(release(FETCHED).before("enginecore")) == ["check-gpu", "fetch"]
    assert "restartPolicy" not in release(FETCHED).before("enginecore")["check-gpu"]


def test_added_containers_have_no_more_rights_than_the_services_unless_they_say_so():
    least = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert release(FETCHED).before("enginecore")["check-gpu"]["securityContext"] == least
    assert release(FETCHED).before("frontend")["proxy"]["securityContext"] == {**least, "readOnlyRootFilesystem": True}
    setting = "coordinator.sidecars[0].securityContext.allowPrivilegeEscalation=true"
    own = release(HUB, "coordinator.sidecars[0].name=x", "coordinator.sidecars[0].image=y", setting)
    assert own.before("coordinator")["x"]["securityContext"] == {**least, "allowPrivilegeEscalation": True}


@pytest.mark.parametrize("component", SERVICES)
def test_nothing_is_added_that_nobody_asked_for(component: str):
    assert "initContainers" not in release(HUB).pod_spec(component)
    assert len(release(FETCHED).pod_spec(component)["containers"]) == 1


def test_a_pool_has_extras_of_its_own():
    settings = (
        "enginecore.pools.a.sidecars[0].name=x",
        "enginecore.pools.a.sidecars[0].image=y",
        "enginecore.pools.b.replicas=1",
    )
    rendered = release(HUB, *settings)
    assert (list(rendered.before("enginecore-a")), list(rendered.before("enginecore-b"))) == (["x"], [])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("frontend.extraVolumes[0].name=tmp", "frontend.extraVolumes: tmp is the name of a volume of the chart"),
        (
            "enginecore.pools.a.extraVolumes[0].name=shm",
            "enginecore.pools.a.extraVolumes: shm is the name of a volume of the chart",
        ),
        ("frontend.extraVolumes[0].nmae=x", "frontend.extraVolumes.0: name is required"),
        ("frontend.extraVolumeMounts[0].name=x", "frontend.extraVolumeMounts.0: mountPath is required"),
        ("coordinator.sidecars[0].name=x", "coordinator.sidecars.0: image is required"),
        (r"commonLabels.penstock\.io/pool=x", "commonLabels"),
        (r"frontend.podLabels.penstock\.io/pool=x", "frontend.podLabels"),
    ],
)
def test_additions_that_conflict_with_the_charts_own_names_are_refused(setting: str, message: str):
    with pytest.raises(ChartError) as caught:
        release(HUB, setting)
    assert message in str(caught.value)
