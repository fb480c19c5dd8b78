import os
import shutil
from pathlib import Path

import pytest

from penstock_common.errors import ConfigError
from penstock_common.lora_registry import LoraAdapter
from penstock_frontend.calls.adapters import AdapterDirectory
from penstock_frontend.config import LoraConfig
from penstock_frontend.dispatch.adapters import Adapters


class Rig:
    def __init__(self, path: Path, **config: int) -> None:
        self.path = path
        self.adapters = Adapters(LoraConfig(directory=str(path), **config), model="base", frontend_id="f")
        self.directory = AdapterDirectory(str(path), 60.0, self.adapters)

    def save(self, name: str, weights: str = "weights") -> None:
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text(weights)

    async def names(self) -> list[str]:
        await self.directory.look()
        return self.adapters.names


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def test_an_adapter_with_the_name_of_an_alias_is_refused_at_the_start(rig: Rig) -> None:
    rig.save("claude")
    aliases = {"claude": ""}
    adapters = Adapters(LoraConfig(directory=str(rig.path)), model="base", aliases=aliases, frontend_id="f")
    with pytest.raises(
        ConfigError, match="model.aliases has the alias 'claude' for 'base', but lora.directory has an adapter"
    ):
        await AdapterDirectory(str(rig.path), 60.0, adapters).begin()


async def test_names_come_and_go_with_subdirectories(rig: Rig) -> None:
    assert await rig.names() == []
    rig.save("poet")
    rig.save("pirate")
    assert await rig.names() == ["pirate", "poet"]
    assert rig.adapters.named("poet").adapter == LoraAdapter("poet", str(rig.path / "poet"))
    shutil.rmtree(rig.path / "poet")
    assert await rig.names() == ["pirate"]


async def test_folders_without_an_adapter_get_no_name(rig: Rig) -> None:
    rig.save(".hidden")
    (rig.path / "empty").mkdir()
    (rig.path / "file").write_text("x")
    rig.save("base")
    assert await rig.names() == []


async def test_a_link_is_followed(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = Rig(tmp_path_factory.mktemp("elsewhere"))
    elsewhere.save("x")
    (rig.path / "linked").symlink_to(elsewhere.path / "x")
    assert await rig.names() == ["linked"]


@pytest.mark.parametrize("how", ["written", "replaced", "touched"])
async def test_what_was_learned_of_other_content_is_forgotten(rig: Rig, how: str) -> None:
    rig.save("poet")
    rig.save("pirate")
    await rig.names()
    for name in ("poet", "pirate"):
        rig.adapters.learned(LoraAdapter(name, str(rig.path / name), b"1" * 16))
    await rig.names()
    assert rig.adapters.named("poet").adapter.digest == b"1" * 16
    weights = rig.path / "poet" / "adapter_model.safetensors"
    if how == "written":
        weights.write_text("longer weights")
    elif how == "replaced":
        weights.with_suffix(".new").write_text("weights")
        weights.with_suffix(".new").rename(weights)
    else:
        os.utime(weights, ns=(1, 1))
    await rig.names()
    assert rig.adapters.named("poet").adapter.digest == b""
    assert rig.adapters.named("pirate").adapter.digest == b"1" * 16


async def test_a_directory_that_cannot_be_read_changes_nothing(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.save("poet")
    assert await rig.names() == ["poet"]
    rig.path.rename(rig.path.with_name("away"))
    for _ in range(3):
        assert await rig.names() == ["poet"]
    assert capsys.readouterr().out.count("lora.directory cannot be read") == 1
    rig.path.with_name("away").rename(rig.path)
    shutil.rmtree(rig.path / "poet")
    assert await rig.names() == []


async def test_names_that_are_too_many_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rig = Rig(tmp_path, max_registered=2)
    for name in ("c", "a", "b"):
        rig.save(name)
    for _ in range(3):
        assert await rig.names() == ["a", "b"]
    assert capsys.readouterr().out.count("has names that were refused (taken, not valid, or too many): c") == 1


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
async def test_one_subdirectory_that_cannot_be_looked_into_holds_up_no_other(
    rig: Rig, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    rig.save("poet")
    rig.save("evil")
    path = rig.path / "evil" / file
    path.unlink()
    path.symlink_to(file)
    assert await rig.names() == ["poet"]
    rig.save("pirate")
    assert await rig.names() == ["pirate", "poet"]
    assert capsys.readouterr().out.count("has 1 subdirectories that cannot be read: evil: Too many levels") == 1
    shutil.rmtree(rig.path / "evil")
    rig.save("evil")
    assert await rig.names() == ["evil", "pirate", "poet"]


@pytest.mark.parametrize("kind", ["pipe", "directory", "device"])
async def test_special_files_in_place_of_a_file_are_left_to_the_engine(rig: Rig, kind: str) -> None:
    rig.save("evil")
    path = rig.path / "evil" / "adapter_config.json"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    assert await rig.names() == ["evil"]


async def test_an_adapter_whose_files_become_unreadable_keeps_its_name(rig: Rig) -> None:
    rig.save("poet")
    assert await rig.names() == ["poet"]
    config = rig.path / "poet" / "adapter_config.json"
    config.unlink()
    config.symlink_to("adapter_config.json")
    rig.save("pirate")
    assert await rig.names() == ["pirate", "poet"]
    shutil.rmtree(rig.path / "poet")
    assert await rig.names() == ["pirate"]


async def test_names_in_no_encoding_hold_up_no_other(rig: Rig) -> None:
    rig.save("poet")
    folder = rig.path / os.fsdecode(b"\xff\xfe")
    folder.mkdir()
    config = folder / "adapter_config.json"
    config.symlink_to("adapter_config.json")
    assert await rig.names() == ["poet"]
    config.unlink()
    config.write_text("{}")
    assert await rig.names() == ["poet"]
