"""Extraction requests: five examples of a text and its JSON record, the same for all requests, and then a new text.

The demo model was trained on this format (``examples/demo_model/tasks.py``), so its answers are right: keys and
punctuation come from the examples, and values come from the text.
"""

import json
import random
from typing import Any

NAMES = ("Mia", "Leo", "Anna", "Tom", "Sara", "Max", "Ella", "Ben", "Lucy", "Sam", "Zoe", "Jack")
CITIES = ("Oslo", "Paris", "Rome", "Lima", "Cairo", "Tokyo", "Berlin", "Madrid", "Dublin", "Boston", "Vienna", "Prague")
ITEMS = (
    "ball",
    "kite",
    "book",
    "lamp",
    "key",
    "hat",
    "drum",
    "boat",
    "bell",
    "map",
    "cup",
    "ring",
    "box",
    "clock",
    "basket",
)
COLORS = ("red", "blue", "green", "yellow", "white", "black", "purple", "pink", "brown")
EXAMPLES = 5
Record = dict[str, str | int | bool]


def person(rng: random.Random) -> tuple[str, Record]:
    """Return a text and its JSON record."""
    name, age, city = rng.choice(NAMES), rng.randint(5, 90), rng.choice(CITIES)
    return f"{name} is {age} years old and lives in {city}.", {"name": name, "age": age, "city": city}


def item(rng: random.Random) -> tuple[str, Record]:
    """Return a text and its JSON record."""
    color, what, price = rng.choice(COLORS), rng.choice(ITEMS), rng.randint(1, 99)
    stock = rng.random() < 0.5
    text = f"A {color} {what} costs {price} dollars and is {'' if stock else 'not '}in stock."
    return text, {"item": what, "color": color, "price": price, "in_stock": stock}


def extractions(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Return chat bodies with persons and items in turn."""
    return [{"messages": messages(number)[0], "max_tokens": 60, "seed": number, **fields} for number in range(count)]


def messages(number: int) -> tuple[list[dict[str, str]], str]:
    """Return the messages of request ``number``, and the expected answer."""
    make = (person, item)[number % 2]
    examples, rng = random.Random(make.__name__), random.Random(number)
    turns: list[dict[str, str]] = []
    for _ in range(EXAMPLES):
        text, record = make(examples)
        turns += [_asked(text), {"role": "assistant", "content": json.dumps(record)}]
    text, record = make(rng)
    return [*turns, _asked(text)], json.dumps(record)


def _asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"Convert to JSON: {text}"}
