"""Memory that the process returns to the system after freeing it."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")

_HOLDS = """
import ctypes, threading
from penstock_common import memory
{calls}

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 // 2**20

def storm():
    blocks, between = [], []
    for _ in range(60):
        blocks.append(bytearray(b"x") * (2 * 2**20))
        between.append(bytearray(3000))
    return between

before, kept = rss(), storm()
kept += storm()
print(rss() - before)
"""

_ARENAS = """
import ctypes, threading
from penstock_common import memory
{calls}
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
together = threading.Barrier(12)

def work():
    together.wait()
    bytearray(100_000)
    together.wait()

threads = [threading.Thread(target=work) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = ctypes.c_void_p(libc.fopen(b"{file}", b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


def said(program: str, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", program], env=env | environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


def test_large_blocks_go_back_to_the_system():
    """Small blocks between the large ones would keep the large ones in the heap."""
    assert int(said(_HOLDS.format(calls=""))) > 60
    assert int(said(_HOLDS.format(calls="memory.give_back_large_blocks()"))) < 20


def test_threads_share_two_arenas(tmp_path: Path):
    file = tmp_path / "info"
    said(_ARENAS.format(calls="", file=file))
    assert file.read_text().count("<heap nr") > 2
    said(_ARENAS.format(calls="memory.use_few_arenas()", file=file))
    assert file.read_text().count("<heap nr") <= 2


def test_the_environment_has_the_last_word(tmp_path: Path):
    file = tmp_path / "info"
    said(_ARENAS.format(calls="memory.use_few_arenas()", file=file), MALLOC_ARENA_MAX="8")
    assert file.read_text().count("<heap nr") > 2


_FREED = """
from penstock_common import memory

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 // 2**20

before = rss()
blocks = [bytearray(b"x") * 100_000 for _ in range(1000)]
between = blocks[::50]
del blocks
print(rss() - before, memory.free_bytes() // 2**20)
memory.give_back_free()
print(rss() - before)
"""


def test_free_memory_is_counted_and_returned():
    held, free, left = map(int, said(_FREED).split())
    assert held > 60
    assert free > 60
    assert left < 20
