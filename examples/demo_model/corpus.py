"""Training text: an endless, seeded stream of documents, and the conversion of documents to text spans.

Run this file to look at a few documents: ``python corpus.py --count 5 --seed 1``.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import scenes
import tasks
from chats import (
    PLAIN_SYSTEM,
    Document,
    Turn,
    exchange,
    memory_chat,
    named_chat,
    pirate_chat,
    plain_chat,
    reading_chat,
    short_chat,
    story_chat,
    turns,
)
from facts import make_fact
from stories import make_story, story_question
from words import pick

BOS, EOS, END = "<s>", "</s>", "<|end|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
LONG_PROMPT = 200
SPECIAL_TOKENS = [BOS, EOS, *ROLE_TOKENS.values(), END]
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>You can call these functions:' }}"
    "{% for tool in tools %}"
    "{% set function = tool['function'] %}"
    "{{ '\n' + function['name'] + '(' }}"
    "{% for name, schema in (function['parameters']['properties'] or {}).items() %}"
    "{{ name }}{% if schema['type'] %}{{ ': ' }}{{ schema['type'] }}{% endif %}{% if not loop.last %}{{ ', ' }}{% endif %}"
    "{% endfor %}"
    "{{ ')' }}{% if function['description'] %}{{ ': ' + (function['description'] | trim) }}{% endif %}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{% if message['role'] == 'tool' %}{{ '<|user|><tool_response>\n' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% elif message['content'] %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'tool' %}{{ '\n</tool_response>' }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' "
    "+ (call['function']['arguments'] | tojson) + '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Span(NamedTuple):
    """A piece of text, and whether the model learns to generate it."""

    text: str
    trained: bool


def plain(text: str) -> Document:
    """Return a document of plain text."""
    return (Turn("text", text),)


def plain_story(rng: random.Random) -> Document:
    """Return a story without a chat format."""
    return plain(make_story(rng).text)


def plain_sums(rng: random.Random) -> Document:
    """Return lines of arithmetic such as ``12 + 30 = 42``."""
    sums = (tasks.make_sum(rng) for _ in range(rng.randint(1, 8)))
    return plain("\n".join(f"{left} {sign} {right} = {result}" for left, sign, right, result in sums))


def plain_questions(rng: random.Random) -> Document:
    """Return facts as plain text, as questions with answers or as sentences."""
    answers = [make_fact(rng) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.6:
        return plain("\n".join(f"Question: {answer.question}\nAnswer: {answer.full}" for answer in answers))
    return plain(" ".join(answer.full for answer in answers))


def plain_scene(rng: random.Random) -> Document:
    """Return a short description of everyday life."""
    return plain(scenes.description(rng))


def long_document(rng: random.Random, words: int) -> Document:
    """Return a conversation with about ``words`` words of stories in the system prompt or earlier turns, and questions."""
    told = [make_story(rng)]
    names = {told[0].name, told[0].friend}
    while sum(len(story.text.split()) for story in told) < words:
        story = make_story(rng)
        if not names & {story.name, story.friend} or len(names) > 24:
            told.append(story)
            names |= {story.name, story.friend}
    counts: dict[str, int] = {}
    for story in told:
        for name in (story.name, story.friend):
            counts[name] = counts.get(name, 0) + 1
    pairs = []
    for _ in range(rng.randint(2, 6)):
        story = pick(rng, told)
        question = story_question(rng, story)
        # A question is unambiguous only if it contains a name that appears in only one story.
        fair = any(counts[name] == 1 and name in question[0] for name in (story.name, story.friend))
        if rng.random() < 0.6 and fair:
            pairs.append(question)
        else:
            pairs.append(exchange(rng))
    text = "\n".join(story.text for story in told)
    roll = rng.random()
    if roll < 0.5:
        opener = pick(rng, ["Use these stories to answer: ", "You know these stories: ", pick(rng, PLAIN_SYSTEM) + " "])
        return (Turn("system", opener + text), *turns(*pairs))
    if roll < 0.75:
        return turns((f"Read these stories: {text}\n{pairs[0][0]}", pairs[0][1]), *pairs[1:])
    return turns(*(("Tell me a story.", story.text) for story in told), *pairs)


SOURCES: list[tuple[Callable[[random.Random], Document], int]] = [
    (plain_story, 16), (plain_scene, 9), (plain_sums, 45), (plain_questions, 6), (plain_chat, 110), (story_chat, 14),
    (reading_chat, 7), (memory_chat, 7), (short_chat, 7), (pirate_chat, 3), (named_chat, 3),
]  # fmt: skip


def make_document(rng: random.Random) -> Document:
    """Return one random document of normal length."""
    return rng.choices([make for make, _ in SOURCES], [weight for _, weight in SOURCES])[0](rng)


def documents(seed: int) -> Iterator[Document]:
    """Yield documents endlessly. The same seed gives the same documents."""
    rng = random.Random(seed)
    while True:
        yield make_document(rng)


def spans(document: Document) -> list[Span]:
    """Return the text of a document with its special tokens. Each span is marked as learned or not learned.

    Prompts are not learned. Long prompts are the exception: they contain stories, which are useful for training.
    """
    result = [Span(BOS, False)]
    for role, text in document:
        if role == "text":
            result.append(Span(text + EOS, True))
        else:
            result.append(Span(ROLE_TOKENS[role], False))
            result.append(Span(text + END, role == "assistant" or len(text) > LONG_PROMPT))
    return result


def render(document: Document) -> str:
    """Return the complete text of a document, including special tokens."""
    return "".join(span.text for span in spans(document))


def main() -> None:
    """Print some documents."""
    parser = argparse.ArgumentParser(description="Print documents of the training text.")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for _, document in zip(range(options.count), documents(options.seed), strict=False):
        print(render(document), end="\n\n")


if __name__ == "__main__":
    main()
