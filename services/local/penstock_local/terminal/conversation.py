"""A conversation with a model: its turns, and what can be done with them. No terminal, no network."""

import json
from collections.abc import Sequence
from pathlib import Path

from penstock_common.errors import PenstockError
from penstock_local.media_files import MediaFile
from penstock_local.rpc.client import ChatMessage


class SaveError(PenstockError):
    """A conversation could not be written. The message names the file."""


class Conversation:
    """Turns of user and assistant in order, behind one system message. ``system`` is empty for none."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[ChatMessage] = []
        self._media: list[MediaFile] = []
        self._saved: set[Path] = set()

    @property
    def messages(self) -> Sequence[ChatMessage]:
        """Everything a request sends."""
        head = [ChatMessage(role="system", content=self.system)] if self.system else []
        return [*head, *self._turns]

    @property
    def num_questions(self) -> int:
        """Turns of the user."""
        return sum(turn.role == "user" for turn in self._turns)

    def show(self, file: MediaFile) -> None:
        """Put an image or a sound before the user's next turn."""
        self._media.append(file)

    @property
    def shown(self) -> Sequence[MediaFile]:
        """What stands before the user's next turn."""
        return tuple(self._media)

    def ask(self, text: str) -> None:
        """Add a turn of the user."""
        self._turns.append(ChatMessage(role="user", content=text, media=tuple(self._media)))
        self._media.clear()

    def answer(self, text: str) -> None:
        """Add a turn of the model."""
        self._turns.append(ChatMessage(role="assistant", content=text))

    def take_back_answer(self) -> bool:
        """Drop what the model said last, so that the last turn is the user's. Returns whether there is one to answer."""
        if self._turns and self._turns[-1].role == "assistant":
            self._turns.pop()
        return bool(self._turns)

    @property
    def turns(self) -> Sequence[ChatMessage]:
        """The turns so far, for ``restore``."""
        return tuple(self._turns)

    def restore(self, turns: Sequence[ChatMessage]) -> None:
        """Go back to these turns."""
        self._turns = list(turns)

    def clear(self) -> None:
        """Drop all turns; the system message stays."""
        self._turns.clear()
        self._media.clear()

    def save(self, file: Path, *, model: str) -> None:
        """Write the turns as JSON, ``{"model": ..., "messages": [{"role": ..., "content": ...}]}``, of media their names.

        Raises SaveError. A file that this conversation did not write is never overwritten.
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
