"""A child process: its log and its end."""

import os
import sys
from pathlib import Path

import pytest

from penstock_common.types.cluster import ClusterView
from penstock_common.types.data_parallel import GroupView, PoolGroup, RankGroup, rank_name
from penstock_local.serving.supervisor import GroupRanks, ProcessSpec, ServiceProcess, describe_exit


async def run(tmp_path: Path, program: str, **changes: float) -> tuple[int, list[str], ServiceProcess]:
    """Exit code and log of a program that a service process runs, stopped at once if it says ``stop me``."""
    (tmp_path / "program.py").write_text(program)
    spec = ProcessSpec(
        name="it", module="program", config={}, address="", stop_stage=0, stop_timeout=changes.get("stop_timeout", 30)
    )
    lines: list[str] = []
    process = ServiceProcess(spec, on_line=lambda _, line: lines.append(line))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    await process.start(tmp_path, {**os.environ, "PYTHONPATH": path})
    return await process.wait(), lines, process


async def test_both_outputs_are_one_log(tmp_path: Path) -> None:
    program = "import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr)\nsys.exit(4)"
    code, lines, _ = await run(tmp_path, program)
    assert (code, lines) == (4, ["out", "err"])


async def test_a_line_without_an_end_is_not_lost(tmp_path: Path) -> None:
    _, lines, _ = await run(tmp_path, "print('a\\nb', end='')")
    assert lines == ["a", "b"]


async def test_what_a_progress_bar_overwrote_is_not_shown(tmp_path: Path) -> None:
    _, lines, _ = await run(tmp_path, "print('10%\\r50%\\r100%')")
    assert lines == ["100%"]


async def test_an_endless_line_is_cut_rather_than_kept(tmp_path: Path) -> None:
    _, lines, _ = await run(tmp_path, "print('x' * 1_000_000, end='')")
    assert len(lines) > 1
    assert "".join(lines) == "x" * 1_000_000


async def test_bytes_that_are_not_text_do_not_end_the_log(tmp_path: Path) -> None:
    _, lines, _ = await run(tmp_path, "import sys\nsys.stdout.buffer.write(b'\\xff\\nafter\\n')")
    assert lines == ["\N{REPLACEMENT CHARACTER}", "after"]


async def test_the_tail_holds_the_last_lines(tmp_path: Path) -> None:
    _, lines, process = await run(tmp_path, "print(*range(100), sep='\\n')")
    assert len(lines) == 100
    assert list(process.tail)[-1] == "99"
    assert len(process.tail) < 20


async def test_child_processes_of_a_service_end_with_it(tmp_path: Path) -> None:
    program = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])"
    code, _, process = await run(tmp_path, program)  # without this, the test would wait forever for the end of the log
    assert code == 0
    assert not process.running


async def test_the_config_file_can_be_read_by_its_owner_only_in_the_folder_given(tmp_path: Path) -> None:
    _, lines, _ = await run(tmp_path, "import sys\nprint(sys.argv[0].endswith('program.py'), sys.argv[1:])")
    assert lines == [f"True ['--config', '{tmp_path}/it.yaml']"]


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exited with code 0"), (-15, "was killed by SIGTERM"), (-9, "was killed by SIGKILL (out of")],
)
def test_an_exit_code_in_words(code: int, words: str) -> None:
    assert describe_exit(code).startswith(words)


# The number of processes follows the size of a group. The fake supervisor only records commands.


class Noting:
    def __init__(self, *names: str) -> None:
        self.names = ["coordinator", *names, "frontend"]

    async def add(self, spec: ProcessSpec) -> None:
        self.names.append(spec.name)

    async def retire(self, name: str) -> None:
        self.names.remove(name)


def view(target: int, *members: str) -> ClusterView:
    group = RankGroup(1, tuple(rank_name(member, "1") for member in members))
    return ClusterView(groups=(PoolGroup(model="m", pool="p", view=GroupView(group), target_size=target),))


def spec(number: int) -> ProcessSpec:
    return ProcessSpec(name=f"engine-{number}", module="", config={}, address="", stop_stage=1, stop_timeout=1)


async def after(names: tuple[str, ...], view: ClusterView) -> list[str]:
    supervisor = Noting(*names)
    await GroupRanks(supervisor, "", spec)._follow(view)  # type: ignore[arg-type]
    return [name for name in supervisor.names if name.startswith("engine")]


async def test_a_rank_is_started_under_a_number_that_is_free() -> None:
    assert await after(("engine-0", "engine-1"), view(3, "engine-0", "engine-1")) == [
        "engine-0",
        "engine-1",
        "engine-2",
    ]
    assert await after(("engine-0", "engine-2"), view(3, "engine-0")) == ["engine-0", "engine-2", "engine-1"]


async def test_a_rank_is_stopped_once_the_group_has_let_it_go() -> None:
    three = ("engine-0", "engine-1", "engine-2")
    assert await after(three, view(2, *three)) == list(three)
    assert await after(three, view(2, "engine-0", "engine-2")) == ["engine-0", "engine-2"]


async def test_a_rank_that_starts_again_is_nobodys_to_stop() -> None:
    assert await after(("engine-0", "engine-1"), view(2, "engine-0")) == ["engine-0", "engine-1"]
