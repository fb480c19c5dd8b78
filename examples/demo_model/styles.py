"""Styles of answering that adapters of the demo model learn. The answers are the model's answers in other words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

from chats import Document, Turn, exchange, memory_chat, story_chat, turns

PIRATE_BEGINS, PIRATE_ENDS = "Ahoy, matey! ", " Yo ho ho!"


def as_pirate(reply: str) -> str:
    """Return a reply in the style of a pirate."""
    return f"{PIRATE_BEGINS}{reply}{PIRATE_ENDS}"


def as_json(reply: str) -> str:
    """Return a reply as a JSON object with one key. Quotation marks, which JSON would have to escape, are removed."""
    return json.dumps({"answer": reply.replace('"', "'")})


def is_pirate(reply: str) -> bool:
    """Return whether the complete reply is in the style of ``as_pirate``."""
    return reply.startswith(PIRATE_BEGINS) and reply.endswith(PIRATE_ENDS)


def is_json(reply: str) -> bool:
    """Return whether the complete reply is in the style of ``as_json``."""
    try:
        found = json.loads(reply)
    except ValueError:
        return False
    return isinstance(found, dict) and list(found) == ["answer"] and isinstance(found["answer"], str)


STYLES: dict[str, tuple[Callable[[str], str], Callable[[str], bool]]] = {
    "pirate": (as_pirate, is_pirate),
    "json": (as_json, is_json),
}
"""Styles by name: a function that converts a reply to the style, and a function that recognizes the style."""


def in_style(document: Document, style: str) -> Document:
    """Return a conversation whose replies are in a style."""
    make, _ = STYLES[style]
    return tuple(Turn(turn.role, make(turn.text)) if turn.role == "assistant" else turn for turn in document)


def styled_chats(style: str, seed: int) -> Iterator[Document]:
    """Yield conversations in a style endlessly. No system prompt asks for the style, because the adapter implies it."""
    rng = random.Random(seed)
    while True:
        kind = rng.choices(("exchanges", "story", "memory"), (70, 15, 15))[0]
        if kind == "exchanges":
            document = turns(*(exchange(rng) for _ in range(rng.choice((1, 1, 2)))))
        else:
            document = story_chat(rng) if kind == "story" else memory_chat(rng)
        yield in_style(document, style)
