"""enginecore/secret.yaml: the secret of engines' internal ports, made once, in the pods that have such ports."""

import base64
from pathlib import Path

import pytest

from penstock_common.security.shared_secret import MIN_SECRET_BYTES
from penstock_enginecore.config import EngineCoreConfig
from tests.chart.rendering import GROUPS, HUB, MULTINODE, POOLS, WORKER, load, release

MOUNT = "/etc/penstock-parallel"
TRANSPORT = "enginecore.kvTransfer.transport=grpc"


@pytest.mark.parametrize(
    ("name", "settings", "components"),
    [
        (GROUPS, (), ("enginecore", "enginecore-wide")),
        (MULTINODE, (), ("enginecore", f"enginecore{WORKER}", "enginecore-wide", f"enginecore-wide{WORKER}")),
        (HUB, (TRANSPORT,), ("enginecore",)),
    ],
)
def test_pods_with_internal_ports_mount_the_one_secret_and_read_it(
    name: str, settings: tuple[str, ...], components: tuple[str, ...], tmp_path: Path
):
    rendered = release(name, *settings)
    (secret,) = rendered.all("Secret")
    assert len(base64.b64decode(secret["data"]["secret"])) >= MIN_SECRET_BYTES
    for component in components:
        volume = rendered.volumes(component)["parallel"]["secret"]
        assert volume == {"secretName": secret["metadata"]["name"], "defaultMode": 0o440}
        assert rendered.mounts(component)[MOUNT]["readOnly"] is True
        if not component.endswith(WORKER):
            config = load(rendered, component, tmp_path)
            assert isinstance(config, EngineCoreConfig)
            assert config.parallel.secret_file == f"{MOUNT}/secret"


@pytest.mark.parametrize(("name", "component"), [(HUB, "enginecore"), (MULTINODE, "enginecore-one"), (HUB, "frontend")])
def test_other_pods_have_none(name: str, component: str):
    rendered = release(name)
    assert "parallel" not in rendered.volumes(component)
    assert "parallel" not in rendered.config(component)


def test_without_such_ports_there_is_none():
    for name in (HUB, POOLS):
        assert not release(name).all("Secret")


def test_a_secret_of_the_users_comes_in_its_place():
    rendered = release(GROUPS, "parallel.existingSecret=of-the-user")
    assert not rendered.all("Secret")
    assert rendered.volumes("enginecore")["parallel"]["secret"]["secretName"] == "of-the-user"


def test_without_a_group_of_the_pod_its_user_can_read_the_file():
    volume = release(GROUPS, "podSecurityContext.fsGroup=null").volumes("enginecore")["parallel"]["secret"]
    assert "defaultMode" not in volume


def test_the_secret_is_in_no_checksum_so_that_pods_stay_when_it_does():
    settings = ["commonLabels.a=x"], ["commonLabels.a=y"]  # rendered twice
    first, second = (release(GROUPS, *each) for each in settings)
    assert first.all("Secret")[0]["data"] != second.all("Secret")[0]["data"]
    found = [each.pod("enginecore")["metadata"]["annotations"]["checksum/config"] for each in (first, second)]
    assert found[0] == found[1]
