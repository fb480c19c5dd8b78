"""Where media stand in a conversation that a template has rendered.

A template that reads parts writes the model's placeholder for each, and nobody else may: where a client's own text has these
characters, or could be made to have them, a mark is put between them that nobody can guess, and taken out when the places are
known. To a template that reads texts, media are such marks themselves.
"""

import re
import uuid
from collections.abc import Sequence
from typing import Any

from penstock_common.errors import InvalidArgument
from penstock_common.types.media import Modality
from penstock_frontend.media_parts import MediaPart
from penstock_frontend.processing.chat.client_texts import changed, openings
from penstock_frontend.processing.media.families.base import Family


class Places:
    """Of one conversation. ``media``: its media, in order."""

    def __init__(self, family: Family, media: Sequence[MediaPart]) -> None:
        self._family = family
        self._media = media
        self._mark = uuid.uuid4().hex
        self._modalities: dict[str, Modality] = {
            family.placeholder(modality): modality for modality in sorted(family.modalities)
        }
        tokens = sorted(self._modalities, key=len, reverse=True)
        self._placeholder = re.compile("|".join(map(re.escape, tokens)))
        self._risky = openings(tokens)
        self._named = re.compile(f"{self._mark}:([0-9]+):{self._mark}")

    def guarded(self, value: Any) -> Any:
        """A template's variable, in which no text is a placeholder, nor the begin of one at its end."""
        return changed(value, lambda text: self._risky.sub(lambda match: f"{match[0]}{self._mark}", text))

    def named(self, index: int) -> str:
        """What stands for the medium of that index where a template reads texts."""
        return f"{self._mark}:{index}:{self._mark}"

    def split(self, rendered: str, *, by_name: bool) -> list[str | MediaPart]:
        """Texts and media of the rendered conversation, in order; no text is empty. ``by_name``: media are where they are
        named, else where the template has written their modality's placeholder. Raises InvalidArgument where it has not written
        each once.
        """
        parts: list[str | MediaPart] = []
        begin, found = 0, []
        queues = {modality: self._of(modality) for modality in self._modalities.values()}
        for match in (self._named if by_name else self._placeholder).finditer(rendered):
            if by_name:
                index = int(match[1])
            elif queue := queues[self._modalities[match[0]]]:
                index = queue.pop(0)
            else:
                raise self._miscounted(self._modalities[match[0]], "more")
            parts += [self._unmarked(rendered[begin : match.start()]), self._media[index]]
            found.append(index)
            begin = match.end()
        parts.append(self._unmarked(rendered[begin:]))
        if sorted(found) != list(range(len(self._media))):
            missing = next((i for i in range(len(self._media)) if found.count(i) != 1), 0)
            raise self._miscounted(self._media[missing].modality, "other")
        return [part for part in parts if part != ""]

    def _of(self, modality: Modality) -> list[int]:
        return [index for index, part in enumerate(self._media) if part.modality == modality]

    def _unmarked(self, text: str) -> str:
        return text.replace(self._mark, "")

    def _miscounted(self, modality: Modality, how: str) -> InvalidArgument:
        count = len(self._of(modality))
        return InvalidArgument(
            f"messages have {count} media of modality {modality}; the model's chat template writes {how} places for them "
            "than one for each",
            field="messages",
        )
