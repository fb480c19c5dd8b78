"""enginecore/_lora.tpl: one block of values configures adapters."""

from pathlib import Path

import pytest

from charts.lint import ChartError
from penstock_enginecore.config import EngineCoreConfig
from penstock_frontend.config import FrontendConfig
from tests.chart.rendering import HUB, MULTINODE, POOLS, WORKER, Release, load, release

ROOT = "/var/lib/penstock/adapters"
ON = "enginecore.lora.enabled=true"
CLAIM = "enginecore.lora.claimName=adapters"
MOUNT = {"name": "adapters", "mountPath": ROOT, "readOnly": True}


def engine_of(rendered: Release, folder: Path, component: str = "enginecore") -> EngineCoreConfig:
    config = load(rendered, component, folder)
    assert isinstance(config, EngineCoreConfig)
    return config


def frontend_of(rendered: Release, folder: Path) -> FrontendConfig:
    config = load(rendered, "frontend", folder)
    assert isinstance(config, FrontendConfig)
    return config


def test_without_adapters_nothing_is_said_of_them():
    rendered = release(HUB)
    for component in ("enginecore", "frontend"):
        assert "lora" not in rendered.config(component)
        assert "adapters" not in rendered.volumes(component)


def test_engines_and_frontends_agree_on_names_and_the_volume(tmp_path: Path):
    rendered = release(
        HUB, ON, CLAIM, "enginecore.lora.adapters.pirate=pirate/2", "enginecore.lora.adapters.poet=/elsewhere/poet/"
    )
    engine, frontend = engine_of(rendered, tmp_path).lora, frontend_of(rendered, tmp_path).lora
    assert (engine.max_loras, engine.max_lora_rank, engine.cpu_memory) == (8, 64, 1024**3)
    assert frontend.serves
    assert frontend.adapters == {"pirate": f"{ROOT}/pirate/2", "poet": "/elsewhere/poet"}
    assert frontend.directory == ""
    assert frontend.allows(f"{ROOT}/later")
    assert rendered.volumes("enginecore")["adapters"]["persistentVolumeClaim"] == {
        "claimName": "adapters",
        "readOnly": True,
    }
    assert rendered.mounts("enginecore")[ROOT] == MOUNT
    assert "adapters" not in rendered.volumes("frontend"), "they need none of the files"


@pytest.mark.parametrize(("directory", "path"), [(".", ROOT), ("live", f"{ROOT}/live"), ("live/", f"{ROOT}/live")])
def test_frontends_that_watch_a_directory_have_the_volume(directory: str, path: str, tmp_path: Path):
    rendered = release(HUB, ON, CLAIM, f"enginecore.lora.directory={directory}")
    assert frontend_of(rendered, tmp_path).lora.directory == path
    assert rendered.mounts("frontend")[ROOT] == MOUNT
    assert rendered.volumes("frontend")["adapters"] == rendered.volumes("enginecore")["adapters"]


def test_any_source_of_a_volume_will_do():
    nfs = ("enginecore.lora.volume.nfs.server=nfs.example", "enginecore.lora.volume.nfs.path=/adapters")
    rendered = release(HUB, ON, *nfs)
    assert rendered.volumes("enginecore")["adapters"]["nfs"] == {"server": "nfs.example", "path": "/adapters"}
    assert rendered.mounts("enginecore")[ROOT] == MOUNT


def test_more_settings_of_adapters_are_the_services_own(tmp_path: Path):
    more = ("enginecore.config.lora.max_wait=9", "frontend.config.lora.max_registered=9")
    rendered = release(HUB, ON, CLAIM, *more, "frontend.config.lora.roots[0]=/trusted")
    assert engine_of(rendered, tmp_path).lora.max_wait == 9
    assert frontend_of(rendered, tmp_path).lora.max_registered == 9
    assert frontend_of(rendered, tmp_path).lora.roots == ("/trusted",)


def test_pools_have_the_same_names_and_memory_of_their_own(tmp_path: Path):
    rendered = release(POOLS)
    for component, memory in (("enginecore", 4 * 1024**3), ("enginecore-spot", 512 * 1024**2)):
        assert engine_of(rendered, tmp_path, component).lora.cpu_memory == memory
        assert rendered.mounts(component)[ROOT] == MOUNT
    assert frontend_of(rendered, tmp_path).lora.adapters == {"pirate": f"{ROOT}/pirate/2"}
    off = release(POOLS, "enginecore.pools.spot.lora.enabled=false", "enginecore.pools.spot.lora.cpuMemory=1GiB")
    assert not engine_of(off, tmp_path, "enginecore-spot").lora.enabled
    assert "adapters" not in off.volumes("enginecore-spot")


def test_every_pod_of_an_engine_has_the_volume():
    rendered = release(MULTINODE, ON, CLAIM)
    for component in ("enginecore", f"enginecore{WORKER}"):
        assert rendered.mounts(component)[ROOT] == MOUNT


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("enginecore.lora.adapters.x=x",),
            r"enginecore.lora.adapters.x is x, a relative path on a volume, but no volume is set",
        ),
        (("enginecore.lora.directory=live",), r"enginecore.lora.directory is live, a relative path on a volume"),
        ((CLAIM, "enginecore.lora.volume.nfs.path=/x"), "enginecore.lora: claimName and volume are both set"),
        (("enginecore.lora.maxLoras=0",), "enginecore.lora.maxLoras"),
        (("enginecore.lora.cpuMemory=much",), "enginecore.lora.cpuMemory"),
        (
            ("enginecore.pools.a.lora.directory=other",),
            r"enginecore.pools.a.lora.directory differs from enginecore.lora",
        ),
        (("enginecore.config.lora.max_loras=4",), "max_loras is not allowed"),
    ],
)
def test_invalid_values_are_refused_by_name(settings: tuple[str, ...], message: str):
    with pytest.raises(ChartError, match=message):
        release(HUB, ON, *settings)
