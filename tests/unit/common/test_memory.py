"""Available memory, and refusals of settings that need more."""

from pathlib import Path

import pytest

from penstock_common.errors import ConfigError
from penstock_common.memory import Memory, check_fits, host_memory

MEMINFO = "MemTotal:       100 kB\nMemAvailable:     50 kB\n"


def told(tmp_path: Path, **files: str) -> Memory | None:
    """Return the memory derived from /proc/meminfo and the control group's files."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    for name, content in files.items():
        (tmp_path / name.replace("_", ".")).write_text(content)
    return host_memory(tmp_path / "meminfo", tmp_path)


def test_without_a_container_it_is_the_machine(tmp_path: Path) -> None:
    assert told(tmp_path) == Memory("this machine", 100 * 1024, 50 * 1024)


def test_a_container_without_a_limit_is_none(tmp_path: Path) -> None:
    assert told(tmp_path, memory_max="max\n") == Memory("this machine", 100 * 1024, 50 * 1024)


def test_a_container_that_leaves_less_counts(tmp_path: Path) -> None:
    assert told(tmp_path, memory_max="20480\n", memory_current="10240\n") == Memory("this container", 20480, 10240)


def test_a_container_that_leaves_more_does_not(tmp_path: Path) -> None:
    told_of = told(tmp_path, memory_max="204800\n", memory_current="10240\n")
    assert told_of is not None
    assert told_of.place == "this machine"


def test_the_page_cache_of_a_container_can_be_taken(tmp_path: Path) -> None:
    stat = "anon 1000\nfile 9000\nactive_file 3000\ninactive_file 5000\n"
    told_of = told(tmp_path, memory_max="20480\n", memory_current="20000\n", memory_stat=stat)
    assert told_of == Memory("this container", 20480, 480 + 8000)


def test_where_the_kernel_does_not_tell_nobody_knows(tmp_path: Path) -> None:
    assert host_memory(tmp_path / "nothing", tmp_path) is None


def test_a_size_beyond_it_is_refused_with_the_numbers() -> None:
    memory = Memory("this machine", 24 * 2**30, 16 * 2**30)
    with pytest.raises(ConfigError) as refused:
        check_fits("--kv-cache-memory", 10 * 2**30, memory, count=2)
    assert str(refused.value) == (
        "--kv-cache-memory is 10737418240 bytes (10.0 GiB) for each of 2 engines; this machine has only 16.0 GiB of "
        "24.0 GiB available"
    )


def test_a_size_that_fits_is_taken() -> None:
    check_fits("--kv-cache-memory", 8 * 2**30, Memory("this machine", 24 * 2**30, 16 * 2**30), count=2)
