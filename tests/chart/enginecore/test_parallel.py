"""enginecore/_parallel.tpl: the secret for engines' internal ports, mounted only in pods with internal ports."""

from pathlib import Path

import pytest

from penstock_enginecore.config import EngineCoreConfig
from tests.chart.rendering import GROUPS, HUB, MULTINODE, WORKER, load, release

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


def test_without_a_group_of_the_pod_its_user_can_read_the_file():
    volume = release(GROUPS, "podSecurityContext.fsGroup=null").volumes("enginecore")["parallel"]["secret"]
    assert "defaultMode" not in volume
