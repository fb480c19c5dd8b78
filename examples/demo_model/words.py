"""Word lists, and the small template language that all text generators use."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def _split(text: str) -> list[str]:
    return text.split()


GIRLS = _split("Ana Mia Lily Rosa Nora Zoe Ella Ruby Hana Ivy Clara Maya Sofia Alice Freya Lucy Emma Olga")
BOYS = _split("Tom Ben Max Leo Sam Omar Finn Jack Hugo Ravi Oscar Noah Felix Adam Ivan Luca Theo Paul")
SYLLABLES = _split("ba be bo da do fa ga ka ki ko la le li lo ma mi mo na ni no pa ra ri ro sa ta ti to va vi za")

ANIMALS = _split("fox rabbit bear mouse owl cat dog turtle duck frog hedgehog squirrel lion elephant horse penguin")
PEOPLE = _split("farmer baker painter sailor gardener teacher doctor pilot king queen")
CITIES = _split("Oslo Paris Rome Lima Cairo Tokyo Berlin Madrid Dublin Boston Delhi Athens Vienna Seoul Prague")
PLACES = [
    "in a small village",
    "near a quiet lake",
    "in a big forest",
    "on a green hill",
    "by the sea",
    "in an old castle",
    "on a little farm",
    "in a busy town",
    "under a tall tree",
    "next to a river",
    "in a snowy valley",
    "on a tiny island",
]
OBJECTS = _split("ball kite book lamp key hat drum boat bell map cup ring box clock scarf basket")
COLORS = _split("red blue green yellow white black purple orange pink brown")
FOODS = _split("bread soup cake apples honey cheese pie berries rice carrots")
FRUITS = _split("apple banana pear plum grape mango peach cherry lemon orange")
ADJECTIVES = _split("little brave kind clever shy happy curious gentle lazy funny quiet lonely young old")
HOBBIES = [
    "sing songs",
    "read books",
    "climb trees",
    "swim in the river",
    "paint pictures",
    "dance in the rain",
    "look at the stars",
    "bake bread",
    "play the drum",
    "plant flowers",
    "run in the fields",
    "tell jokes",
]
JOBS = _split("farmer baker painter sailor gardener teacher doctor pilot singer writer")

CATEGORIES: dict[str, list[str]] = {
    "animals": ANIMALS,
    "colors": COLORS,
    "fruits": FRUITS,
    "jobs": JOBS,
    "cities": CITIES,
    "toys": ["ball", "kite", "doll", "drum", "train", "puzzle", "yo-yo", "robot"],
    "vegetables": ["carrot", "potato", "onion", "bean", "pea", "cabbage", "pepper", "radish"],
    "shapes": ["circle", "square", "triangle", "star", "oval", "diamond"],
    "birds": ["owl", "duck", "eagle", "swan", "robin", "crow", "parrot", "penguin"],
    "tools": ["hammer", "saw", "drill", "rake", "shovel", "wrench", "axe"],
    "drinks": ["water", "milk", "tea", "juice", "coffee", "lemonade"],
    "planets": ["Mars", "Venus", "Earth", "Saturn", "Jupiter", "Neptune"],
}
NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five"}

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """Return one random item. The call is shorter than ``rng.choice``, and keeps the type of the items."""
    return items[rng.randrange(len(items))]


def article(noun: str) -> str:
    """Return ``noun`` with the right indefinite article in front of it."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun


def invented_name(rng: random.Random) -> str:
    """Return an invented name, so that the model learns to copy names and not only to recall them."""
    return "".join(pick(rng, SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()


def any_name(rng: random.Random) -> str:
    """Return a listed name in most calls, and an invented name in the others."""
    return invented_name(rng) if rng.random() < 0.3 else pick(rng, GIRLS + BOYS)


def expand(template: str, rng: random.Random, slots: Mapping[str, str] | None = None) -> str:
    """Fill a template: ``[a|b]`` picks an alternative (innermost first), ``{slot}`` inserts a value."""
    previous = ""
    while previous != template:
        previous = template
        template = _CHOICE.sub(lambda match: pick(rng, match.group(1).split("|")), template)
    if slots:
        template = _SLOT.sub(lambda match: slots[match.group(1)], template)
    return template


def join_and(items: Sequence[str]) -> str:
    """Join words in English: ``a, b and c``."""
    if len(items) < 2:
        return "".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]
