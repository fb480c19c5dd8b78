"""Templates that requests bring: rendered in a process of their own, within limits of time and memory."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import InvalidArgument
from penstock_frontend.processing.chat import template_process
from penstock_frontend.processing.chat.template_process import TemplateProcess

ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set x = namespace(text='aaaaaaaa') %}{% for i in range(60) %}{% set x.text = x.text ~ x.text %}{% endfor %}"
)


@pytest.fixture
async def process() -> AsyncIterator[TemplateProcess]:
    running = TemplateProcess()
    yield running
    await running.close()


async def render(process: TemplateProcess, source: str, *, max_chars: int = 1000, **variables: Any) -> str:
    messages = [{"role": "user", "content": "Köln"}]
    variables = {"messages": messages, "tools": None, **variables}
    return await process.render(source, {"bos_token": "<s>"}, variables, max_chars=max_chars)


async def test_it_renders_with_the_models_special_tokens(process: TemplateProcess) -> None:
    source = "{{ bos_token }}{{ messages[0].content }}|{{ tools is none }}"
    assert await render(process, source) == "<s>Köln|True"
    assert await asyncio.gather(*(render(process, f"{i}") for i in range(5))) == list("01234")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("\n\n{{ a | no_such_filter }}", "line 3: No filter named 'no_such_filter'"),
        ("{{ raise_exception('no') }}", "chat_template refuses the messages: no"),
        ("{{ messages.__class__.__mro__ }}", "chat_template refuses the messages: access to attribute '__class__'"),
        (ENDLESS, "rendering takes longer than its time limit"),
        (DOUBLING, "chat_template"),
        ("{{ '%9999999999d' % 1 }}", "chat_template"),
        ("{{ 'a' | center(9999999999) }}", "chat_template"),
    ],
)
async def test_a_bad_template_is_refused_and_the_next_one_is_rendered(
    process: TemplateProcess, source: str, problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem) as raised:
        await render(process, source)
    assert raised.value.field == "chat_template"
    assert await render(process, "ok") == "ok"


async def test_a_prompt_that_is_too_long_is_refused(process: TemplateProcess) -> None:
    with pytest.raises(InvalidArgument, match="more than 10 characters") as raised:
        await render(process, "{{ messages[0].content * 3 }}", max_chars=10)
    assert raised.value.field == "messages"


async def test_a_process_that_does_not_look_at_the_clock_is_killed(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await render(process, "ok") == "ok"
    with monkeypatch.context() as patched:
        patched.setattr(template_process, "KILLED_AFTER", 0.05)
        with pytest.raises(InvalidArgument, match="chat_template takes longer than 0.05 s"):
            await render(process, ENDLESS)
    assert await render(process, "ok") == "ok"


async def test_a_process_that_died_is_replaced(process: TemplateProcess) -> None:
    assert await render(process, "ok") == "ok"
    child = process._process
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with pytest.raises(InvalidArgument, match="crashed the process that renders it"):
        await render(process, "ok")
    assert await render(process, "ok") == "ok"


async def test_a_cancelled_call_ends_the_process_and_its_answer_reaches_no_other_call(process: TemplateProcess) -> None:
    assert await render(process, "ok") == "ok"
    call = asyncio.create_task(render(process, ENDLESS))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await render(process, "next") == "next"


async def test_it_has_nothing_of_the_frontends_secrets(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    assert await render(process, "ok") == "ok"
    child = process._process
    assert child is not None
    environment = await asyncio.to_thread(Path(f"/proc/{child.pid}/environ").read_bytes)
    assert b"PENSTOCK_API_KEY" not in environment


async def test_half_a_character_is_refused(process: TemplateProcess) -> None:
    with pytest.raises(InvalidArgument, match="half a character"):
        await render(process, "ok", messages=[{"role": "user", "content": "\ud800"}])
