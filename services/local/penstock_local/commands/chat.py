"""``penstock chat``: a conversation in the terminal."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock_common.errors import WRONG_MODEL_KIND, ConfigError, PenstockError, RequestFailed, Unimplemented, nearest
from penstock_common.types.outputs import FinishReason
from penstock_local.commands.generate import describe_end
from penstock_local.media_files import Modality, read_media
from penstock_local.rpc.client import ChatMessage, InferenceClient, Piece, ServerUnreachableError
from penstock_local.terminal.answer_writer import AnswerWriter
from penstock_local.terminal.console import dim, fail
from penstock_local.terminal.conversation import Conversation, SaveError
from penstock_local.terminal.failures import describe_failure, unreachable
from penstock_local.terminal.line_reader import LineReader

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
    """The flags of ``penstock chat``."""

    address: str
    model: str = ""
    """Empty: the one that is served."""
    lora: str = ""
    """An adapter of it; empty: none."""
    system: str = ""
    """The system message; empty: none."""
    verbose: bool = False
    """Whether a line on tokens and speed follows each answer."""
    sampling: Mapping[str, Any] = {}
    """Fields of SamplingParams; the server chooses those that are missing."""


class Answer(msgspec.Struct, kw_only=True):
    """What has come of an answer."""

    text: str = ""
    last: Piece | None = None
    """Its last piece; None when the answer was stopped before it ended."""
    num_tokens: int = 0
    seconds: float = 0.0
    """From the request to the last piece."""


def chat(options: ChatOptions) -> int:
    """Answer messages until the user leaves. Returns the exit code: 1 when a message from a pipe could not be answered.

    The event loop runs only while an answer comes, not while the user types: so Ctrl-C stops an answer, or an input line.
    """
    with asyncio.Runner() as runner:
        client = runner.run(_connect(options.address))
        try:
            return Chat(options, client, runner, LineReader()).run()
        except KeyboardInterrupt:  # between two messages of a pipe
            sys.stderr.write("\n")
            return 130
        finally:
            runner.run(client.__aexit__())


async def _connect(address: str) -> InferenceClient:
    """A client inside the running event loop, where its channel belongs."""
    return InferenceClient(address)


class Chat:
    """The loop of a conversation: read a message or a command, act on it."""

    def __init__(
        self, options: ChatOptions, client: InferenceClient, runner: asyncio.Runner, reader: LineReader
    ) -> None:
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
        """Returns the exit code."""
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
        """Name the model and the server. Raises what the server failed with."""
        models = self._runner.run(self._client.models())
        self._model = self._model or next((model.name for model in models), "")
        if self._reader.interactive:
            _note(f"{self._model} at {self._client.address}; /help lists what you can do, Ctrl-D leaves")

    def _turn(self) -> bool:
        """One message or command. Returns False when the user leaves."""
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
            fail(f"there is no {name}{nearest(name, self._commands) or '; /help lists what there is'}")
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
            fail(f"/{modality} needs the name of a file")
            return True
        try:
            self._conversation.show(read_media(name, modality, of=f"/{modality}"))
        except ConfigError as e:
            fail(str(e))
        else:
            _note(f"{name} goes with the next message")
        return True

    def _reset(self, _: str) -> bool:
        self._conversation.clear()
        _note("the conversation was cleared")
        return True

    def _save(self, name: str) -> bool:
        if not name:
            fail("/save needs the name of a file")
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

    def _answer(self, before: Sequence[ChatMessage]) -> None:
        """Ask the server, show the answer, keep it. Without an answer the turns are again those ``before``.

        Raises what the server failed with when another message would fail as well, or the messages come from a pipe.
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
        """Show the answer as it comes and keep it in ``answer``, also where it ends with an error."""
        started = time.monotonic()
        stdout = AnswerWriter()
        options = self._options
        pieces = self._client.chat(
            self._conversation.messages, model=options.model, lora=options.lora, sampling=options.sampling
        )
        try:
            async for piece in pieces:
                stdout.write(piece)
                answer.text += piece.text
                answer.num_tokens += piece.num_tokens
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
        elif answer.last.finish_reason is FinishReason.LENGTH:
            _note("[the answer was cut: it reached --max-tokens, or the model's longest sequence]")


def _never_answers(error: PenstockError) -> bool:
    """Whether every message to this server would fail in the same way."""
    return isinstance(error, Unimplemented) or (isinstance(error, RequestFailed) and error.reason == WRONG_MODEL_KIND)


def _explain(error: PenstockError) -> str:
    """The server's message, and what to do about it."""
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
