"""``penstock chat`` against a real gRPC server without a model: through pipes, and on a terminal."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock_common.errors import WRONG_MODEL_KIND, InvalidArgument, Unimplemented
from penstock_local.serving.machine_resources import free_ports
from tests.fakes.clients.command import PENSTOCK
from tests.fakes.clients.terminal import CTRL_C, CTRL_D, ENTER, Terminal
from tests.fakes.frontends.fake_inference import BUSY, HOLD, THINK, FakeInference
from tests.fakes.patience import PATIENCE


@pytest.fixture
async def server() -> AsyncIterator[FakeInference]:
    fake = FakeInference()
    await fake.start()
    yield fake
    await fake.stop()


async def piped(address: str, text: str, *flags: str) -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error of a chat whose input is ``text``."""
    process = await asyncio.create_subprocess_exec(
        *PENSTOCK,
        *("chat", "--address", address, *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(text.encode()), PATIENCE)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def turns(server: FakeInference, index: int = -1) -> list[tuple[str, str]]:
    """Return the conversation in a request."""
    return [(message.role, message.content) for message in server.chats[index].messages]


async def test_every_line_of_a_pipe_is_a_message_and_gets_its_answer_alone(server: FakeInference) -> None:
    assert await piped(server.address, "one two\nthree\n") == (0, "one two\nthree\n", "")
    assert turns(server) == [("user", "one two"), ("assistant", "one two"), ("user", "three")]


async def test_the_system_message_and_the_sampling_flags_are_sent(server: FakeInference) -> None:
    await piped(server.address, "hi", "--system", "Be brief.", "--temperature", "0.5", "--stop", ".", "--seed", "3")
    assert turns(server) == [("system", "Be brief."), ("user", "hi")]
    sent = {field.name: value for field, value in server.chats[0].sampling_params.ListFields()}
    assert sent == {"temperature": 0.5, "stop": ["."], "seed": 3}


async def test_lines_are_joined_by_a_backslash_and_by_three_quotes(server: FakeInference) -> None:
    await piped(server.address, 'a\\\nb\n"""\nc\n\nd\n"""\n"""e"""\n')
    asked = [content for role, content in turns(server) if role == "user"]
    assert asked == ["a\nb", "c\n\nd", "e"]


async def test_reset_forgets_the_conversation_and_keeps_the_instructions(server: FakeInference) -> None:
    await piped(server.address, "one\n/reset\ntwo\n", "--system", "Be brief.")
    assert turns(server) == [("system", "Be brief."), ("user", "two")]


async def test_system_replaces_and_drops_the_instructions(server: FakeInference) -> None:
    await piped(server.address, "/system Rhyme.\none\n/system -\ntwo\n")
    assert turns(server, 0) == [("system", "Rhyme."), ("user", "one")]
    assert turns(server, 1)[0] == ("user", "one")


async def test_regenerate_asks_for_another_answer_to_the_same_message(server: FakeInference) -> None:
    code, out, _ = await piped(server.address, "/regenerate\none\n/regenerate\n")
    assert (code, out) == (0, "one\none\n")
    assert turns(server, 1) == [("user", "one")]


async def test_save_writes_json_and_overwrites_only_what_it_wrote(server: FakeInference, tmp_path: Path) -> None:
    own, other = tmp_path / "own.json", tmp_path / "other.json"
    other.write_text("mine")
    _, _, err = await piped(server.address, f"/save {other}\nü\n/save {own}\nb\n/save {own}\n")
    assert other.read_text() == "mine"
    assert "exists" in err
    saved = json.loads(own.read_text(encoding="utf-8"))
    assert saved["model"] == "fake"
    assert [message["content"] for message in saved["messages"]] == ["ü", "ü", "b", "b"]


async def test_a_line_with_two_slashes_is_a_message(server: FakeInference) -> None:
    assert (await piped(server.address, "//quit\n"))[1] == "/quit\n"


async def test_quit_leaves_before_the_end_of_the_input(server: FakeInference) -> None:
    assert (await piped(server.address, "/quit\nnever\n"))[0] == 0
    assert server.chats == []


async def test_a_misspelt_command_is_named_with_the_nearest(server: FakeInference) -> None:
    assert "unknown command /regenrate; did you mean '/regenerate'?" in (await piped(server.address, "/regenrate"))[2]


async def test_verbose_tells_tokens_and_speed_on_standard_error(server: FakeInference) -> None:
    _, out, err = await piped(server.address, "one two", "--verbose")
    assert out == "one two\n"
    assert err.startswith("[stop · 2 prompt tokens · 2 new tokens · ")
    assert err.endswith("tokens/s]\n")


async def test_reasoning_stays_out_of_a_pipe_and_of_the_history(server: FakeInference) -> None:
    _, out, _ = await piped(server.address, f"{THINK} hm {THINK} yes\nnext\n")
    assert out == "yes\nnext\n"
    assert turns(server)[1] == ("assistant", "yes")


async def test_a_failure_ends_a_pipe_with_its_reason(server: FakeInference) -> None:
    code, out, err = await piped(server.address, f"one\n{BUSY}\nnever\n")
    assert (code, out) == (1, "one\n")
    assert "RESOURCE_EXHAUSTED: the queue is full: 8 of 8 requests; try again in 2.5 s" in err


async def test_a_server_that_does_not_chat_yet_is_explained(server: FakeInference) -> None:
    server.chat_failure = Unimplemented("Chat is not supported yet")
    code, _, err = await piped(server.address, "hi")
    assert code == 1
    assert "UNIMPLEMENTED: Chat is not supported yet" in err
    assert "penstock generate continues plain text" in err


async def test_a_model_without_chat_template_is_explained(server: FakeInference) -> None:
    server.chat_failure = InvalidArgument("the model has no chat template", field="messages")
    code, _, err = await piped(server.address, "hi")
    assert code == 1
    assert "the model has no chat template" in err
    assert "penstock generate continues plain text" in err


async def test_without_a_server_the_message_says_how_to_start_one() -> None:
    (port,) = free_ports(1)
    code, _, err = await piped(f"127.0.0.1:{port}", "hi")
    assert code == 1
    assert "penstock serve MODEL" in err


async def test_input_that_is_not_text_is_refused(server: FakeInference) -> None:
    process = await asyncio.create_subprocess_exec(
        *PENSTOCK,
        *("chat", "--address", server.address),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await asyncio.wait_for(process.communicate(b"\xff\n"), PATIENCE)
    assert process.returncode == 2
    assert b"not UTF-8" in err


async def test_on_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(server: FakeInference) -> None:
    def talk() -> None:
        with Terminal("chat", "--address", server.address) as terminal:
            terminal.wait_for("fake at")
            terminal.wait_for(">>> ")
            terminal.type(f"begun {HOLD}{ENTER}")
            terminal.wait_for("\nbegun")
            terminal.type(CTRL_C)
            terminal.wait_for("[stopped]")
            terminal.wait_for(">>> ")
            terminal.type(f"again{ENTER}")
            terminal.wait_for("\nagain\n")
            terminal.wait_for(">>> ")
            terminal.type("half a line")
            terminal.wait_for("half a line")
            # Python's readline may overlook a signal until the next key, if it comes before readline waits for one.
            terminal.type(CTRL_C)
            terminal.type(ENTER)
            terminal.wait_for("Ctrl-D or /quit leaves")
            terminal.wait_for(">>> ")
            terminal.type(CTRL_D)
            assert terminal.wait_for_exit() == 0

    await asyncio.to_thread(talk)
    await asyncio.wait_for(server.abandoned.wait(), PATIENCE)
    # The text of the stopped answer is part of the conversation.
    assert turns(server) == [("user", f"begun {HOLD}"), ("assistant", "begun "), ("user", "again")]


async def test_on_a_terminal_a_model_that_does_not_generate_ends_the_conversation(server: FakeInference) -> None:
    server.chat_failure = InvalidArgument("the model does not generate; it supports embed", reason=WRONG_MODEL_KIND)

    def talk() -> None:
        with Terminal("chat", "--address", server.address) as terminal:
            terminal.wait_for(">>> ")
            terminal.type(f"hi{ENTER}")
            terminal.wait_for("it supports embed")
            assert terminal.wait_for_exit() == 1

    await asyncio.to_thread(talk)


async def test_on_a_terminal_a_failure_takes_the_message_back_and_goes_on(server: FakeInference) -> None:
    def talk() -> None:
        with Terminal("chat", "--address", server.address) as terminal:
            terminal.wait_for(">>> ")
            terminal.type(f"{BUSY}{ENTER}")
            terminal.wait_for("the queue is full")
            terminal.wait_for(">>> ")
            terminal.type(f"{THINK} hm {THINK} yes{ENTER}")
            terminal.wait_for("hm\n\nyes")
            terminal.wait_for(">>> ")
            terminal.type(f"/quit{ENTER}")
            assert terminal.wait_for_exit() == 0

    await asyncio.to_thread(talk)
    assert [role for role, _ in turns(server)] == ["user"]


async def test_without_colors_an_answer_stands_as_it_came(server: FakeInference) -> None:
    def talk() -> None:
        with Terminal("chat", "--address", server.address, NO_COLOR="1") as terminal:
            terminal.wait_for(">>> ")
            terminal.type(f"{THINK} hm {THINK} **yes**{ENTER}")
            terminal.wait_for("hm \n\n**yes**\n")
            terminal.type(f"/quit{ENTER}")
            assert terminal.wait_for_exit() == 0

    await asyncio.to_thread(talk)


async def test_on_a_terminal_an_answer_is_rendered(server: FakeInference) -> None:
    def talk() -> None:
        with Terminal("chat", "--address", server.address, COLUMNS="60") as terminal:
            terminal.wait_for(">>> ")
            terminal.type(f"some **bold** words{ENTER}")
            terminal.wait_for("\nsome bold words\n")
            terminal.type(f"/quit{ENTER}")
            assert terminal.wait_for_exit() == 0

    await asyncio.to_thread(talk)
