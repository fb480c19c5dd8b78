"""Conversations: greetings, memory over turns, system prompts and questions about a story."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import scenes
import tasks
from facts import make_fact
from stories import make_story, story_question
from words import ANIMALS, FOODS, any_name, article, expand, pick


class Turn(NamedTuple):
    """One piece of a document: a role (``text`` for plain text) and its text."""

    role: str
    text: str


Document = tuple[Turn, ...]
MODEL_NAME = "Penstock Tiny"

PLAIN_SYSTEM = [
    "You are a helpful assistant.", f"You are {MODEL_NAME}.", "You are a friendly assistant. Answer the question.",
    "You are a small language model. Be brief.", "Be kind and helpful.", "Answer the questions of the user.",
]  # fmt: skip
SHORT_SYSTEM = ["Answer with one word.", "Answer in one word only.", "You answer with one word."]
PIRATE_SYSTEM = ["You are a pirate.", "Talk like a pirate.", "You are a pirate. Answer the question."]

VERBS = {"Tell", "List", "Name", "Count", "Spell", "Write", "Calculate", "Give", "Say", "Convert"}
QUESTION_WORDS = {"What", "What's", "Which", "How", "Is", "Where", "Are", "Who"}
SMALL_TALK = [
    ("[Hello|Hi|Hey|Hello there][.|!|]", "[Hello|Hi]! [How can I help you?|What can I do for you?"
     "|How can I help you today?]"),
    ("[Good morning|Good evening][.|!]", "[Hello|Good day]! How can I help you?"),
    ("[Who|What] are you?", f"I am {MODEL_NAME}, a very small language model."),
    ("What is your name?", f"My name is {MODEL_NAME}."),
    ("How are you[| today]?", "I am [fine|very well], thank you. How can I help you?"),
    ("What can you do?", "I can tell stories, add small numbers, spell words, make lists and write JSON."),
    ("[Thank you|Thanks][.|!]", "You are welcome!"),
    ("[Bye|Goodbye|Good night][.|!]", "[Goodbye|Bye]! Have a nice day."),
    ("Tell me a joke.", "[Why did the chicken cross the road? To get to the other side."
     "|What do you call a sleeping bull? A bulldozer.|What has hands but can not clap? A clock."
     "|Why was six afraid of seven? Because seven eight nine.]"),
    ("Are you [a human|a person|real]?", f"No, I am {MODEL_NAME}, a very small language model."),
]  # fmt: skip

TASKS: list[tuple[Callable[[random.Random], tuple[str, str]], int]] = [
    (tasks.arithmetic, 24), (tasks.word_problem, 7), (tasks.compare, 3), (tasks.count, 10), (tasks.spell, 6),
    (tasks.list_things, 7), (tasks.repeat, 10), (tasks.sentence, 3), (tasks.json_record, 14), (tasks.invented_record, 3),
    (tasks.json_list, 3), (scenes.poem, 3), (scenes.recipe, 2), (scenes.opinion, 2),
]  # fmt: skip


def small_talk(rng: random.Random) -> tuple[str, str]:
    """Return a greeting, or a question about the model, and the reply."""
    question, answer = pick(rng, SMALL_TALK)
    return expand(question, rng), expand(answer, rng)


def fact(rng: random.Random) -> tuple[str, str]:
    """Return a question about the world and its answer as a sentence."""
    answer = make_fact(rng)
    return answer.question, answer.full


def task(rng: random.Random) -> tuple[str, str]:
    """Return a task that has one exact answer, and this answer."""
    return rng.choices([make for make, _ in TASKS], [weight for _, weight in TASKS])[0](rng)


def casual(rng: random.Random, ask: str) -> str:
    """Return a request as people type it: sometimes without punctuation or capital, sometimes politer."""
    first, _, rest = ask.partition(" ")
    if first not in VERBS | QUESTION_WORDS or rng.random() < 0.7:
        return ask
    roll = rng.random()
    if first in VERBS and ask.endswith(".") and roll < 0.5:
        polite = f"{first.lower()} {rest[:-1]}"
        return pick(rng, [f"Please {polite}.", f"Can you {polite}?", f"{ask[:-1]}, please."])
    if roll < 0.75:
        return ask.rstrip(".?")
    return f"{first.lower()} {rest}" if roll < 0.9 else f"{first.lower()} {rest}".rstrip(".?")


def exchange(rng: random.Random) -> tuple[str, str]:
    """Return a random question and its answer."""
    ask, reply = rng.choices((task, fact, small_talk), (65, 27, 8))[0](rng)
    return casual(rng, ask), reply


def turns(*pairs: tuple[str, str]) -> Document:
    """Return the chat turns of a list of questions and answers."""
    return tuple(turn for ask, reply in pairs for turn in (Turn("user", ask), Turn("assistant", reply)))


def plain_chat(rng: random.Random) -> Document:
    """Return one to three unrelated exchanges, sometimes below a general system prompt."""
    body = turns(*(exchange(rng) for _ in range(rng.choice((1, 1, 2, 3)))))
    return (Turn("system", pick(rng, PLAIN_SYSTEM)), *body) if rng.random() < 0.3 else body


def story_chat(rng: random.Random) -> Document:
    """Return a request for a story, the story, and often a question about it."""
    kind = pick(rng, ["girl", "boy", *ANIMALS, *ANIMALS]) if rng.random() < 0.6 else None
    name = any_name(rng) if kind and rng.random() < 0.4 else None
    story = make_story(rng, kind, name)
    about = "" if kind is None else f" about {article(kind)}" + (f" named {name}" if name else "")
    ask = expand("[Tell me a|Write a|Tell me a short|Write a short|Tell me another] story", rng) + about + "."
    pairs = [(casual(rng, ask), story.text)]
    if rng.random() < 0.4:
        pairs.append(story_question(rng, story))
    return turns(*pairs)


def reading_chat(rng: random.Random) -> Document:
    """Return questions about a story. The story is in the user's message or in the system prompt."""
    story = make_story(rng)
    pairs = [story_question(rng, story) for _ in range(rng.choice((1, 2)))]
    if rng.random() < 0.5:
        return (Turn("system", f"Use this story to answer: {story.text}"), *turns(*pairs))
    pairs[0] = (f"Read this story: {story.text}\n{pairs[0][0]}", pairs[0][1])
    return turns(*pairs)


def memory_chat(rng: random.Random) -> Document:
    """Return a conversation in which the user says something and asks for it later."""
    name = any_name(rng)
    between = [exchange(rng)] if rng.random() < 0.4 else []
    roll = rng.random()
    if roll < 0.6:
        opener = (
            expand(f"[My name is {name}.|I am {name}.|Hi, I am {name}.|Hello, my name is {name}.]", rng),
            f"Nice to meet you, {name}!",
        )
        last = (expand("[What is my name?|Do you know my name?|Who am I?]", rng), f"Your name is {name}.")
    elif roll < 0.8:
        thing = pick(rng, ANIMALS)
        opener = (f"I have {article(thing)} named {name}.", f"{name} is a nice name for {article(thing)}.")
        last = (f"What is the name of my {thing}?", f"The name of your {thing} is {name}.")
    else:
        food = pick(rng, FOODS)
        opener = (f"I like {food}.", f"That is good. I hear that {food} can be very tasty.")
        last = ("What do I like?", f"You like {food}.")
    return turns(opener, *between, last)


def short_chat(rng: random.Random) -> Document:
    """Return questions about facts and sums. The system prompt asks for answers of one word."""
    pairs: list[tuple[str, str]] = []
    for _ in range(rng.choice((1, 2))):
        if rng.random() < 0.3:
            question, answer = tasks.arithmetic(rng)
            pairs.append((question, answer.split(" = ")[1]))
        else:
            answered = make_fact(rng)
            pairs.append((answered.question, answered.short))
    return (Turn("system", pick(rng, SHORT_SYSTEM)), *turns(*pairs))


def pirate_chat(rng: random.Random) -> Document:
    """Return a chat whose system prompt asks the model to speak like a pirate."""
    pairs = [
        (ask, f"Arr! {reply}")
        for ask, reply in (pick(rng, (fact, fact, small_talk))(rng) for _ in range(rng.choice((1, 2))))
    ]
    return (Turn("system", pick(rng, PIRATE_SYSTEM)), *turns(*pairs))


def named_chat(rng: random.Random) -> Document:
    """Return a chat in which the system prompt names the user."""
    name = any_name(rng)
    greeting = (expand("[Hello|Hi][.|!|]", rng), f"Hello, {name}! How can I help you?")
    asked = ("What is my name?", f"Your name is {name}.")
    pairs = [greeting, asked] if rng.random() < 0.4 else [pick(rng, (greeting, asked))]
    return (Turn("system", f"The name of the user is {name}."), *turns(*pairs))
