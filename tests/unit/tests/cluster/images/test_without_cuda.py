"""A hollow library stands in for the real one wherever that is loaded."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cluster.images.without_cuda import exported, hollow, soname

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or shutil.which("readelf") is None, reason="needs gcc and readelf"
)

SOURCE = """
#include <stdlib.h>
__attribute__((constructor)) void begin(void) { abort(); }
int plain(void) { return 7; }
int versioned(void) { return 7; }
__attribute__((weak)) int weak(void) { return 7; }
__attribute__((weak)) int _Zof_a_template(void) { return 7; }
"""
PROGRAM = """
int plain(void); int versioned(void); int weak(void);
int main(void) { return plain() + versioned() + weak(); }
"""


def run(*command: str | Path) -> int:
    return subprocess.run([str(word) for word in command], check=False).returncode


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """One that ends every process that loads it."""
    (tmp_path / "real.c").write_text(SOURCE)
    (tmp_path / "versions").write_text("LIB_1 { global: versioned; };")
    path = tmp_path / "libreal-1.so"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libreal.so.1", f"-Wl,--version-script={tmp_path / 'versions'}"]
    assert run("gcc", *flags, "-o", path, tmp_path / "real.c") == 0
    (tmp_path / "libreal.so.1").symlink_to(path.name)
    return path


def test_it_keeps_the_name_the_symbols_and_their_versions(library: Path):
    before = exported(library)
    hollow(library)
    assert soname(library) == "libreal.so.1"
    assert exported(library)["LIB_1"] == before["LIB_1"] == ["versioned"]
    assert {"plain", "weak"} <= set(exported(library)[""])


def test_what_was_linked_with_the_real_one_runs_with_it_and_gets_nothing(library: Path, tmp_path: Path):
    (tmp_path / "program.c").write_text(PROGRAM)
    program = tmp_path / "program"
    assert run("gcc", "-o", program, tmp_path / "program.c", library, f"-Wl,-rpath,{tmp_path}", "-Wl,-z,now") == 0
    assert run(program) != 0
    hollow(library)
    assert run(program) == 0


def test_it_leaves_out_templates_of_cpp_which_would_stand_before_everybodys(library: Path):
    hollow(library)
    assert "_Zof_a_template" not in exported(library)[""]
