"""Installed agent programs run a task of five tool calls against a frontend. Their traffic stays on this machine.

tests/integration/test_agent_requests.py sends recorded requests of the same runs, and needs none of the programs.
"""

from pathlib import Path

import pytest

from tests.fakes.clients.agents.programs import AGENTS
from tests.fakes.clients.agents.recorded import ANSWER, PROGRAMS, Recorded
from tests.fakes.frontends.scripted_model import scripted_model
from tests.fakes.network.alone import Ended, can_run_alone, run_alone
from tests.fakes.patience import PATIENCE

TASK = "Find out what answer.py should print, and run it."
NOTES = "six times seven\n"


def test_every_recorded_program_can_be_run() -> None:
    assert {Recorded(name).program for name in AGENTS} == {Recorded(name).program for name in PROGRAMS}


@pytest.mark.parametrize("name", AGENTS)
async def test_a_program_reaches_its_goal(name: str, tmp_path: Path) -> None:
    program = AGENTS[name]
    work, home = tmp_path / "work", tmp_path / "home"
    run = Recorded(name, work=str(work))
    executable = program.find()
    if executable is None:
        pytest.skip(
            f"no {program.executable} on PATH or in PENSTOCK_AGENTS (npm install -g {run.package}@{run.version})"
        )
    if not can_run_alone():
        pytest.skip("no network namespaces, which keep agent programs on this machine (unshare of util-linux, root)")
    work.mkdir()
    home.mkdir()
    (work / "notes.txt").write_text(NOTES)
    environment = program.configure(home)
    async with scripted_model(tmp_path, unknown_fields="refuse") as model:
        model.says([turn.tokens for turn in run.turns])

        async def call(*words: str) -> Ended:
            return await run_alone(
                [executable, *words], model.port, folder=work, environment=environment, limit=2 * PATIENCE
            )

        if first := program.preparation():
            prepared = await call(*first)
            assert prepared.code == 0, prepared.output
        ended = await call(*(word.format(task=TASK) for word in program.command))
        assert (ended.code, ANSWER in ended.output) == (0, True), ended.output
        assert len(model.prompts) == len(run.turns), ended.output
    assert (work / "answer.py").read_text() == "print(6 * 7)\n"
    last = model.prompts[-1]
    results = last.split("<tool_response>")[1:]
    said = ("notes.txt", NOTES.strip(), "", "42", "No such file")
    assert len(results) == len(said)
    assert all(text in result for text, result in zip(said, sorted_by_call(results), strict=True)), last


def sorted_by_call(results: list[str]) -> list[str]:
    """Return the results in the order of their calls. Programs may send results of parallel calls in any order."""
    *first, a, b = results
    return [*first, *((a, b) if "No such file" in b else (b, a))]
