"""Kernels that were compiled before, in a place that is never written to, and those that are compiled now."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.kernel_cache.precompiled import open_cache
from tests.fakes.models.interpreted_kernels import interpreted

interpreted("norm")
from triton import knobs  # noqa: E402 - settled above how kernels run
from triton.runtime.cache import FileCacheManager, get_cache_manager  # noqa: E402

from penstock_enginecore.kernel_cache.two_layer_cache import use_cache  # noqa: E402

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def places(tmp_path: Path) -> Iterator[Path]:
    """Restore Triton's own settings after the test."""
    knobs.cache.dir = str(tmp_path / "own")
    yield tmp_path
    knobs.cache.manager_class = None
    del knobs.cache.dir


def compiled(place: Path, key: str = "6b6579") -> None:
    """Write a compiled kernel called ``k`` into ``place``, as Triton does."""
    before, knobs.cache.dir = knobs.cache.dir, str(place)
    manager = FileCacheManager(get_cache_manager(key).key)
    group = {name: manager.put(name.encode(), name) for name in ("k.json", "k.cubin")}
    manager.put_group("k.json", group)
    knobs.cache.dir = before


def test_a_kernel_is_found_where_it_was_shipped_to_and_nothing_is_written(tmp_path: Path) -> None:
    compiled(tmp_path / "build")
    shutil.move(tmp_path / "build", tmp_path / "image")  # the cached paths still refer to the old folder
    for path in (tmp_path / "image").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    lookups = use_cache(tmp_path / "image")
    group = get_cache_manager("6b6579").get_group("k.json")
    assert group is not None
    assert {name: Path(path).read_bytes() for name, path in group.items()} == {
        "k.json": b"k.json",
        "k.cubin": b"k.cubin",
    }
    assert get_cache_manager("6b6579").get_file("k.cubin") == group["k.cubin"]
    assert (lookups.found, lookups.compiled) == (1, 0)
    assert not list((tmp_path / "own").iterdir())


def test_what_was_not_shipped_is_compiled_and_found_again(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    lookups = use_cache(tmp_path / "image")
    manager = get_cache_manager("6b6579")
    assert manager.get_group("k.json") is None
    assert manager.get_file("k.cubin") is None
    path = manager.put(b"code", "k.cubin")
    assert Path(path).is_relative_to(tmp_path / "own")
    manager.put_group("k.json", {"k.cubin": path})
    assert get_cache_manager("6b6579").get_group("k.json") == {"k.cubin": path}
    assert (lookups.found, lookups.compiled) == (1, 1)
    assert not list((tmp_path / "image").iterdir())


def test_a_kernel_of_which_a_file_is_missing_is_compiled(tmp_path: Path) -> None:
    compiled(tmp_path / "image")
    next((tmp_path / "image").rglob("k.cubin")).unlink()
    lookups = use_cache(tmp_path / "image")
    assert get_cache_manager("6b6579").get_group("k.json") is None
    assert lookups.compiled == 1


def test_where_nothing_can_be_written_kernels_are_compiled_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    knobs.cache.dir = str(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING):
        use_cache(tmp_path)
    assert "file/cache is not writable, so compiled kernels are stored in" in caplog.text
    assert Path(get_cache_manager("6b6579").put(b"code", "k.cubin")).read_bytes() == b"code"
    shutil.rmtree(knobs.cache.dir)


def test_a_cache_is_opened_for_gpus_alone_and_must_be_there(tmp_path: Path) -> None:
    assert open_cache("", CUDA) is None
    assert open_cache(str(tmp_path), torch.device("cpu")) is None
    with pytest.raises(ConfigError, match="kernels.cache is '/nowhere', which is not a directory on this machine"):
        open_cache("/nowhere", CUDA)
    found: Any = open_cache(str(tmp_path), CUDA)
    assert (found.found, found.compiled) == (0, 0)


def test_groups_are_as_triton_writes_them(tmp_path: Path) -> None:
    """Check Triton's own format, which the tests above assume."""
    compiled(tmp_path / "image")
    [group] = (tmp_path / "image").rglob("__grp__k.json")
    assert set(json.loads(group.read_bytes())["child_paths"]) == {"k.json", "k.cubin"}
