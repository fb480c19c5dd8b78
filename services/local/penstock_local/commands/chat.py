"""Implementation of ``penstock chat``: a conversation in the terminal."""

import asyncio
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock_client import AsyncClient, ChatMessage, ChatOutput, Model, SamplingParams, message
from penstock_common.errors import WRONG_MODEL_KIND, ConfigError, PenstockError, RequestFailed, Unimplemented, nearest
from penstock_local.commands.generate import describe_end
from penstock_local.commands.markdown_view import AnswerWriter
from penstock_local.console import BOLD, DIM, dim, fail, use_color
from penstock_local.media_files import MediaFile, Modality, read_media
from penstock_local.rpc.client import (
    ServerUnreachableError,
    check_chosen,
    describe_failure,
    explained,
    make_client,
    unreachable,
)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation.

    Attributes:
        role: system, user or assistant.
        media: Images and audio before the content.
    """

    role: str
    content: str
    media: tuple[MediaFile, ...] = ()

    def message(self) -> ChatMessage:
        """Return the turn as a client message."""
        if self.media:
            return message(self.role, *(file.message() for file in self.media), self.content)
        return ChatMessage(role=self.role, content=self.content)


class SaveError(PenstockError):
    """Error for a conversation that could not be written. The message names the file."""


class Conversation:
    """Turns of the user and the assistant, after an optional system message. ``system`` is empty if there is none."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[Turn] = []
        self._media: list[MediaFile] = []
        self._saved: set[Path] = set()

    @property
    def messages(self) -> Sequence[Turn]:
        """Messages of the next request."""
        head = [Turn(role="system", content=self.system)] if self.system else []
        return [*head, *self._turns]

    @property
    def num_questions(self) -> int:
        """Number of the user's turns."""
        return sum(turn.role == "user" for turn in self._turns)

    def show(self, file: MediaFile) -> None:
        """Add an image or audio item to the user's next turn."""
        self._media.append(file)

    @property
    def shown(self) -> Sequence[MediaFile]:
        """Images and audio items of the user's next turn."""
        return tuple(self._media)

    def ask(self, text: str) -> None:
        """Add a turn of the user."""
        self._turns.append(Turn(role="user", content=text, media=tuple(self._media)))
        self._media.clear()

    def answer(self, text: str) -> None:
        """Add a turn of the model."""
        self._turns.append(Turn(role="assistant", content=text))

    def take_back_answer(self) -> bool:
        """Drop the model's last answer, if any. Returns whether the conversation now ends with a turn of the user."""
        if self._turns and self._turns[-1].role == "assistant":
            self._turns.pop()
        return bool(self._turns)

    @property
    def turns(self) -> Sequence[Turn]:
        """Turns so far, for ``restore``."""
        return tuple(self._turns)

    def restore(self, turns: Sequence[Turn]) -> None:
        """Reset the conversation to these turns."""
        self._turns = list(turns)

    def clear(self) -> None:
        """Drop all turns but keep the system message."""
        self._turns.clear()
        self._media.clear()

    def save(self, file: Path, *, model: str) -> None:
        """Write the turns as JSON: ``{"model": ..., "messages": [{"role": ..., "content": ...}]}``.

        Media are written as names.

        Raises SaveError if the file cannot be written. A file that this conversation did not write is never
        overwritten.
        """
        messages = [
            {"role": turn.role, "content": turn.content}
            | ({"media": [file.name for file in turn.media]} if turn.media else {})
            for turn in self.messages
        ]
        text = json.dumps({"model": model, "messages": messages}, ensure_ascii=False, indent=2) + "\n"
        try:
            with file.open("w" if file.absolute() in self._saved else "x", encoding="utf-8") as out:
                out.write(text)
        except FileExistsError:
            raise SaveError(f"{file} exists; choose another name") from None
        except OSError as e:
            raise SaveError(f"cannot write {file}: {e.strerror}") from None
        self._saved.add(file.absolute())


_PROMPT, _CONTINUATION = ">>> ", "... "
_QUOTES = '"""'


class LineReader:
    """Reader of messages from standard input. A final backslash continues a line; triple quotes enclose several lines.

    On a terminal, readline edits and recalls lines, and a pasted block is one message. The prompt goes to standard
    output if that is a terminal, else to standard error. If standard input is a pipe, no prompt is written.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")
        self._edits = self.interactive and sys.stdout.isatty()
        if self._edits:
            with contextlib.suppress(ImportError):  # Some Python builds have no readline.
                import readline

                readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self) -> str:
        """Return the next message.

        Raises EOFError at the end of input, KeyboardInterrupt, or ConfigError if the input is not UTF-8.
        """
        try:
            return self._message()
        except UnicodeDecodeError as e:
            raise ConfigError(f"standard input is not UTF-8: {e}") from None

    def _message(self) -> str:
        line = self._line(_PROMPT)
        if line.lstrip().startswith(_QUOTES):
            return self._block(line.lstrip().removeprefix(_QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(_CONTINUATION))
        return "\n".join(lines)

    def _block(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(self._line(_CONTINUATION))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        if self._edits:
            if not use_color(sys.stdout):
                return input(prompt)
            # Mark the color codes, so that readline knows that they have no width.
            code = BOLD if prompt == _PROMPT else DIM
            return input(f"\x01\x1b[{code}m\x02{prompt}\x01\x1b[0m\x02")
        if self.interactive:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


EXIT_FAILED = 1

_HELP = '''\
  /help            this list
  /system TEXT     give the model instructions; /system shows, /system - drops them
  /image FILE      show the model an image with the next message; a URL where the server fetches it
  /audio FILE      play it a sound
  /regenerate      another answer to the last message
  /reset           forget the conversation, keep the instructions
  /save FILE       write the conversation as JSON
  /quit            leave; so does Ctrl-D

  A line that ends in \\ goes on in the next; """ begins and ends a block of lines.
  Ctrl-C stops an answer. //text sends a message that begins with a slash.
'''


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of ``penstock chat``."""

    address: str
    model: str = ""
    """Name of the model; empty for the served model."""
    lora: str = ""
    """Name of a LoRA adapter of the model; empty for none."""
    system: str = ""
    """System message; empty for none."""
    verbose: bool = False
    """Whether to show the token count and speed after each answer."""
    sampling: Mapping[str, Any] = {}
    """Given fields of SamplingParams. The server's defaults apply to the other fields."""


class Answer(msgspec.Struct, kw_only=True):
    """State of an answer while it is received."""

    text: str = ""
    last: ChatOutput | None = None
    """Last piece of the answer; None if the answer was stopped before its end."""
    seconds: float = 0.0
    """Seconds from the request to the last piece."""


def chat(options: ChatOptions) -> int:
    """Answer messages until the user leaves. Returns the exit code: 1 if a message from a pipe could not be answered.

    The event loop runs only while an answer is received, not while the user types. So Ctrl-C stops an answer or an
    input line.
    """
    with asyncio.Runner() as runner:
        client = runner.run(_connect(options.address))
        try:
            return Chat(options, client, runner, LineReader()).run()
        except KeyboardInterrupt:  # Ctrl-C between two messages from a pipe
            sys.stderr.write("\n")
            return 130
        finally:
            runner.run(client.close())


async def _connect(address: str) -> AsyncClient:
    """Create the client inside the running event loop, because its channel is bound to that loop."""
    return make_client(address)


class Chat:
    """Loop of a conversation, which reads messages and commands and handles them."""

    def __init__(self, options: ChatOptions, client: AsyncClient, runner: asyncio.Runner, reader: LineReader) -> None:
        self._options = options
        self._client = client
        self._runner = runner
        self._reader = reader
        self._conversation = Conversation(options.system)
        self._model = options.lora or options.model
        self._commands: dict[str, Callable[[str], bool]] = {
            "/help": self._help,
            "/system": self._system,
            "/image": lambda name: self._show(name, "image"),
            "/audio": lambda name: self._show(name, "audio"),
            "/regenerate": self._regenerate,
            "/reset": self._reset,
            "/save": self._save,
            "/quit": lambda _: False,
        }

    def run(self) -> int:
        """Run the conversation. Returns the exit code."""
        try:
            self._greet()
            while self._turn():
                pass
        except ServerUnreachableError as e:
            fail(unreachable(e))
            return EXIT_FAILED
        except RequestFailed as e:
            fail(_explain(e))
            return EXIT_FAILED
        return 0

    def _greet(self) -> None:
        """Show the names of the model and the server. Raises the server's error if it fails, and ConfigError if the
        server has several models and the options name none.
        """
        models = self._runner.run(self._models())
        if not self._model:
            check_chosen(models, self._options.address)
        self._model = self._model or next((model.name for model in models), "")
        if self._reader.interactive:
            _note(f"{self._model} at {self._options.address}; /help lists what you can do, Ctrl-D leaves")

    async def _models(self) -> Sequence[Model]:
        async with explained(self._options.address):
            return await self._client.models()

    def _turn(self) -> bool:
        """Handle one message or command. Returns False when the user leaves."""
        try:
            text = self._reader.read()
        except EOFError:
            if self._reader.interactive:
                sys.stderr.write("\n")
            return False
        except KeyboardInterrupt:
            if not self._reader.interactive:
                raise
            sys.stderr.write("\n")
            _note("Ctrl-D or /quit leaves")
            return True
        if not text.strip():
            return True
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text.strip().partition(" ")
            return self._command(name, argument.strip())
        before = self._conversation.turns
        self._conversation.ask(text.removeprefix("/") if text.startswith("//") else text)
        self._answer(before)
        return True

    def _command(self, name: str, argument: str) -> bool:
        action = self._commands.get(name)
        if action is None:
            fail(f"unknown command {name}{nearest(name, self._commands) or '; /help lists the commands'}")
            return True
        return action(argument)

    def _help(self, _: str) -> bool:
        sys.stderr.write(_HELP)
        return True

    def _system(self, text: str) -> bool:
        if text:
            self._conversation.system = "" if text == "-" else text
        _note(f"system: {self._conversation.system}" if self._conversation.system else "there is no system message")
        return True

    def _show(self, name: str, modality: Modality) -> bool:
        if not name:
            fail(f"/{modality} needs a file name")
            return True
        try:
            self._conversation.show(read_media(name, modality, of=f"/{modality}"))
        except ConfigError as e:
            fail(str(e))
        else:
            _note(f"{name} will be sent with the next message")
        return True

    def _reset(self, _: str) -> bool:
        self._conversation.clear()
        _note("the conversation was cleared")
        return True

    def _save(self, name: str) -> bool:
        if not name:
            fail("/save needs a file name")
            return True
        try:
            self._conversation.save(Path(name).expanduser(), model=self._model)
        except SaveError as e:
            fail(str(e))
        else:
            _note(f"saved in {name}")
        return True

    def _regenerate(self, _: str) -> bool:
        before = self._conversation.turns
        if self._conversation.take_back_answer():
            self._answer(before)
        else:
            fail("there is no message to answer yet")
        return True

    def _answer(self, before: Sequence[Turn]) -> None:
        """Send the conversation, show the answer and add it. If the request fails, restore the turns ``before``.

        Raises the server's error if every further message would also fail, or if messages come from a pipe.
        """
        answer = Answer()
        try:
            self._runner.run(self._stream(answer))
        except KeyboardInterrupt:
            if not self._reader.interactive:
                raise
            _note("[stopped]")
        except PenstockError as e:
            self._conversation.restore(before)
            lost = isinstance(e, ServerUnreachableError) and self._conversation.num_questions == 0
            if not self._reader.interactive or lost or _never_answers(e):
                raise
            fail(_explain(e))
            return
        if answer.text or answer.last is not None:
            self._conversation.answer(answer.text)
        else:
            self._conversation.restore(before)
        self._describe(answer)

    async def _stream(self, answer: Answer) -> None:
        """Show the answer while it is received, and store it in ``answer``, even if it ends with an error."""
        started = time.monotonic()
        stdout = AnswerWriter()
        options = self._options
        messages = [turn.message() for turn in self._conversation.messages]
        sampling = SamplingParams(**options.sampling)
        try:
            async with explained(options.address):
                async for piece in self._client.stream_chat(messages, sampling, model=options.model, lora=options.lora):
                    stdout.write(piece)
                    answer.text += piece.content
                    if piece.finish_reason is not None:
                        answer.last = piece
        finally:
            answer.seconds = time.monotonic() - started
            stdout.end()

    def _describe(self, answer: Answer) -> None:
        if answer.last is None:
            return
        if self._options.verbose:
            sys.stderr.write(dim(describe_end([answer.last], seconds=answer.seconds)) + "\n")
        elif answer.last.finish_reason == "length":
            _note("[the answer was cut off: it reached --max-tokens or the model's maximum sequence length]")


def _never_answers(error: PenstockError) -> bool:
    """Return whether every message to this server would fail in the same way."""
    return isinstance(error, Unimplemented) or (isinstance(error, RequestFailed) and error.reason == WRONG_MODEL_KIND)


def _explain(error: PenstockError) -> str:
    """Return the server's message with advice."""
    if not isinstance(error, RequestFailed):
        return str(error)
    text = describe_failure(error)
    if isinstance(error, Unimplemented) or "template" in error.message:
        return f"{text}\nThe server cannot chat with this model; penstock generate continues plain text."
    if error.reason == "PROMPT_TOO_LONG":
        return f"{text}\nThe conversation is too long: /reset clears it."
    return text


def _note(text: str) -> None:
    sys.stderr.write(dim(text) + "\n")
    sys.stderr.flush()
