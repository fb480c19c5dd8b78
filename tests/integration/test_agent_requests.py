"""Recorded runs of agent programs: five tool calls, streamed, over each protocol."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes.clients.agents.answers import read
from tests.fakes.clients.agents.recorded import ANSWER, PROGRAMS, Answer, Recorded
from tests.fakes.frontends.scripted_model import ScriptedModel, scripted_model

CALLS = {
    "/v1/chat/completions": "tool_calls",
    "/v1/messages?beta=true": "tool_use",
    "/v1/responses": "response.completed",
}
ENDS = {"/v1/chat/completions": "stop", "/v1/messages?beta=true": "end_turn", "/v1/responses": "response.completed"}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ScriptedModel]:
    """Yield a server that refuses unknown fields, so the tests fail if these programs send an unknown field."""
    async with scripted_model(tmp_path_factory.mktemp("agents"), unknown_fields="refuse") as model:
        yield model


async def answers_to(run: Recorded, model: ScriptedModel) -> list[Answer]:
    """Send all requests of a run and return the answers. Each request contains the identifiers from earlier answers."""
    answers: list[Answer] = []
    for number in range(len(run.turns)):
        response = await model.http.post(run.path, json=run.body(number, answers), headers=run.headers)
        assert response.status_code == 200, response.text
        answers.append(read(run.path, response.text))
    return answers


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_run_of_a_program_is_answered_from_its_first_call_to_its_last_word(
    model: ScriptedModel, program: str
) -> None:
    run = Recorded(program)
    turns = run.turns
    model.says([turn.tokens for turn in turns])
    answers = await answers_to(run, model)
    assert [answer.turn for answer in answers] == turns
    assert [answer.finish for answer in answers] == [*[CALLS[run.path]] * (len(turns) - 1), ENDS[run.path]]
    assert sum(len(turn.calls) for turn in turns) == 5
    assert answers[-1].turn.text == ANSWER


@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_model_sees_the_tools_and_all_that_happened(model: ScriptedModel, program: str) -> None:
    run = Recorded(program)
    turns = run.turns
    model.says([turn.tokens for turn in turns])
    await answers_to(run, model)
    first, *_, last = model.prompts
    assert all(f'"name": "{name}"' in first for name in run.tools)
    history = last[len(first) :]
    places = [0]
    for turn in turns[:-1]:
        for part in (turn.thought if run.keeps_thoughts else "", turn.text, *(name for name, _ in turn.calls)):
            places.append(history.index(part, places[-1]))
    results = ("notes.txt", "six times seven", "answer.py", "42", "No such file")
    assert [text for text in results if text in history] == [*results]


@pytest.mark.parametrize("program", [name for name in PROGRAMS if Recorded(name).keeps_thoughts])
async def test_a_prompt_goes_on_where_the_answer_before_it_ended(model: ScriptedModel, program: str) -> None:
    """Checks that each prompt starts with the previous prompt and answer, so the prefix cache covers both."""
    run = Recorded(program)
    turns = run.turns
    model.says([turn.tokens for turn in turns])
    await answers_to(run, model)
    for prompt, turn, following in zip(model.prompts, turns, model.prompts[1:], strict=False):
        assert following.startswith(prompt + turn.tokens)
