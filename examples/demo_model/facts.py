"""A small, fixed set of facts. Each fact is a question with a full answer and a one-word answer."""

from __future__ import annotations

import random
from typing import NamedTuple

from words import ANIMALS, CATEGORIES, FRUITS, article, expand, invented_name, pick


class Answer(NamedTuple):
    """A question, its answer as a sentence, and its answer as one word."""

    question: str
    full: str
    short: str


CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Norway": "Oslo", "Japan": "Tokyo",
    "China": "Beijing", "India": "Delhi", "Egypt": "Cairo", "Greece": "Athens", "Peru": "Lima", "Cuba": "Havana",
    "Ireland": "Dublin", "England": "London", "Portugal": "Lisbon", "Austria": "Vienna", "Poland": "Warsaw",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Russia": "Moscow", "Kenya": "Nairobi",
    "Canada": "Ottawa", "Turkey": "Ankara", "Chile": "Santiago", "South Korea": "Seoul", "Hungary": "Budapest",
    "Belgium": "Brussels", "the Czech Republic": "Prague", "Thailand": "Bangkok",
}  # fmt: skip
SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "lion": "roar", "owl": "hoot",
    "frog": "ribbit", "horse": "neigh", "pig": "oink", "bee": "buzz", "mouse": "squeak", "snake": "hiss",
}  # fmt: skip
BABIES = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal", "duck": "duckling",
    "lion": "cub", "bear": "cub", "frog": "tadpole", "pig": "piglet", "chicken": "chick", "goat": "kid",
}  # fmt: skip
COLOR_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a lemon": "yellow", "milk": "white",
    "the sun": "yellow", "a tomato": "red", "an orange": "orange", "coal": "black", "a carrot": "orange",
    "a strawberry": "red", "chocolate": "brown", "a leaf": "green", "a flamingo": "pink", "a cherry": "red",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "happy": "sad", "fast": "slow", "day": "night", "open": "closed",
    "old": "young", "light": "dark", "wet": "dry", "full": "empty", "left": "right", "early": "late", "hard": "soft",
    "loud": "quiet", "good": "bad", "high": "low", "long": "short", "black": "white", "yes": "no", "near": "far",
}  # fmt: skip
LEGS = {
    "dog": "four", "cat": "four", "bird": "two", "duck": "two", "spider": "eight", "ant": "six", "horse": "four",
    "snake": "no", "fish": "no", "chicken": "two", "bee": "six", "cow": "four", "elephant": "four", "person": "two",
}  # fmt: skip
EATS = {
    "rabbit": "carrots", "cow": "grass", "monkey": "bananas", "mouse": "cheese", "bear": "honey", "lion": "meat",
    "bird": "seeds", "cat": "fish", "panda": "bamboo", "horse": "hay", "squirrel": "nuts", "frog": "flies",
}  # fmt: skip
LIVES = {
    "fish": "in the water", "bird": "in a nest", "bear": "in the forest", "camel": "in the desert", "bee": "in a hive",
    "penguin": "on the ice", "cow": "on a farm", "whale": "in the sea", "monkey": "in the jungle",
    "ant": "in the ground",
}  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]  # fmt: skip
USES = {
    "key": "open a door", "pen": "write", "knife": "cut food", "lamp": "see in the dark", "boat": "cross the water",
    "oven": "bake bread", "clock": "tell the time", "broom": "clean the floor", "bed": "sleep", "cup": "drink",
    "umbrella": "stay dry", "book": "read",
}  # fmt: skip


def _after(rng: random.Random, ring: list[str]) -> Answer:
    index, step = rng.randrange(len(ring)), rng.choice((1, 1, -1))
    word, there = ring[index], ring[(index + step) % len(ring)]
    side = "after" if step == 1 else "before"
    noun = "month" if ring is MONTHS else "day"
    question = expand(f"[What|Which] {noun} comes {side} {word}?", rng)
    return Answer(question, f"{there} comes {side} {word}.", there)


def _is_a(rng: random.Random) -> Answer:
    kinds = {"animal": ANIMALS, "fruit": FRUITS, "vegetable": CATEGORIES["vegetables"], "tool": CATEGORIES["tools"]}
    kind, other = pick(rng, list(kinds)), pick(rng, list(kinds))
    if rng.random() < 0.5:
        other = kind
    thing = article(pick(rng, kinds[other]))
    yes = kind == other
    full = f"{'Yes' if yes else 'No'}, {thing} is {article(other)}."
    return Answer(f"Is {thing} {article(kind)}?", full, "Yes" if yes else "No")


def _capital(rng: random.Random) -> Answer:
    if rng.random() < 0.06:
        unknown = f"What is the capital of {invented_name(rng)}?"
        return Answer(unknown, "I am sorry, I do not know that country.", "Unknown")
    country, city = pick(rng, list(CAPITALS.items()))
    full = f"The capital of {country} is {city}."
    if rng.random() < 0.75:
        question = expand(f"[What is|What's|Tell me|Name] the capital of {country}", rng)
        return Answer(question + ("?" if question.startswith("What") else "."), full, city)
    name = country[0].upper() + country[1:]
    return Answer(f"{city} is the capital of which country?", f"{city} is the capital of {country}.", name)


def _opposite(rng: random.Random) -> Answer:
    word, value = pick(rng, list(OPPOSITES.items()))
    if rng.random() < 0.5:
        word, value = value, word
    return Answer(f"What is the opposite of {word}?", f"The opposite of {word} is {value}.", value)


def _look_up(rng: random.Random, table: dict[str, str], question: str, full: str) -> Answer:
    key, value = pick(rng, list(table.items()))
    slots = {"key": key, "Key": key[0].upper() + key[1:], "a_key": article(key), "value": value}
    slots |= {"A_key": article(key).capitalize(), "a_value": article(value)}
    return Answer(expand(question, rng, slots), expand(full, rng, slots), value)


TABLES = {
    1: (SOUNDS, "What sound does {a_key} make?", "{A_key} says {value}."),
    2: (BABIES, "What is a baby {key} called?", "A baby {key} is called {a_value}."),
    3: (COLOR_OF, "What color is {key}?", "{Key} is {value}."),
    5: (LEGS, "How many legs does {a_key} have?", "{A_key} has {value} legs."),
    6: (EATS, "What does {a_key} eat?", "{A_key} eats {value}."),
    7: (LIVES, "Where does {a_key} live?", "{A_key} lives {value}."),
    9: (USES, "What is {a_key} for?", "You use {a_key} to {value}."),
}


def make_fact(rng: random.Random) -> Answer:
    """Return a random fact from the tables above."""
    topic = rng.choices(range(11), weights=(6, 2, 2, 2, 3, 2, 2, 2, 3, 2, 2))[0]
    if topic in TABLES:
        return _look_up(rng, *TABLES[topic])
    if topic == 0:
        return _capital(rng)
    if topic == 4:
        return _opposite(rng)
    if topic == 8:
        return _after(rng, DAYS if rng.random() < 0.5 else MONTHS)
    return _is_a(rng)
