"""Tasks with exact answers: arithmetic, counting, spelling, lists and JSON records."""

from __future__ import annotations

import json
import random

from words import (
    ADJECTIVES,
    ANIMALS,
    BOYS,
    CATEGORIES,
    CITIES,
    COLORS,
    FRUITS,
    GIRLS,
    JOBS,
    NUMBER_WORDS,
    OBJECTS,
    any_name,
    article,
    expand,
    join_and,
    pick,
)

Pair = tuple[str, str]


def make_sum(rng: random.Random) -> tuple[int, str, int, int]:
    """Return ``(left, operator, right, result)`` with a result that is never negative."""
    small = rng.random() < 0.35
    top = 10 if small else 99
    left, right = rng.randint(0, top), rng.randint(0, top)
    roll = rng.random()
    if roll < 0.5:
        return left, "+", right, left + right
    if roll < 0.92:
        left, right = max(left, right), min(left, right)
        return left, "-", right, left - right
    left, right = rng.randint(0, 10), rng.randint(0, 10)
    return left, "*", right, left * right


def arithmetic(rng: random.Random) -> Pair:
    """Return a chat question about a small calculation and its answer."""
    left, sign, right, result = make_sum(rng)
    words = {"+": ["+", "+", "plus"], "-": ["-", "-", "minus"], "*": ["*", "times"]}
    question = expand(
        f"[What is {left} {{sign}} {right}?|What's {left} {{sign}} {right}?|{left} {{sign}} {right} = ?"
        f"|Calculate {left} {{sign}} {right}.|How much is {left} {{sign}} {right}?]",
        rng,
        {"sign": pick(rng, words[sign])},
    )
    return question, f"{left} {sign} {right} = {result}"


def word_problem(rng: random.Random) -> Pair:
    """Return a word problem with one calculation, and its answer, which begins with the calculation."""
    name = any_name(rng)
    thing = pick(
        rng,
        [fruit + "s" for fruit in FRUITS if fruit not in ("cherry", "peach", "mango")] + ["balls", "books", "coins"],
    )
    have = rng.randint(1, 12)
    if rng.random() < 0.5:
        change = rng.randint(1, 12)
        story, sign, left = f"[gets|finds|buys] {change} more", "+", have + change
    else:
        have = rng.randint(2, 15)
        change = rng.randint(1, have - 1)
        story, sign, left = (
            f"[eats|loses|gives away] {change}" if thing[:-1] in FRUITS else f"loses {change}",
            "-",
            have - change,
        )
    question = expand(f"{name} has {have} {thing} and {story}. How many {thing} does {name} have now?", rng)
    return question, f"{have} {sign} {change} = {left}. {name} has {left} {thing if left != 1 else thing[:-1]} now."


def compare(rng: random.Random) -> Pair:
    """Return a question about the bigger or smaller of two numbers."""
    left, right = rng.sample(range(100), 2)
    bigger = rng.random() < 0.5
    word = "bigger" if bigger else "smaller"
    answer, other = (max(left, right), min(left, right)) if bigger else (min(left, right), max(left, right))
    return f"Which number is {word}, {left} or {right}?", f"{answer} is {word} than {other}."


def count(rng: random.Random) -> Pair:
    """Return an instruction to count up or down, and the numbers."""
    start = rng.choice((1, 1, rng.randint(0, 40)))
    stop = start + rng.randint(2, 12)
    if rng.random() < 0.25:
        return f"Count down from {stop} to {start}.", ", ".join(map(str, range(stop, start - 1, -1)))
    template = f"Count from {start} to {stop}." if start != 1 or rng.random() < 0.6 else f"Count to {stop}."
    return template, ", ".join(map(str, range(start, stop + 1)))


def spell(rng: random.Random) -> Pair:
    """Return an instruction to spell a word and its letters."""
    word = pick(rng, ANIMALS + OBJECTS + FRUITS + COLORS + JOBS + ADJECTIVES + [name.lower() for name in GIRLS + BOYS])
    return expand(f"[Spell {word}.|Spell the word {word}.|How do you spell {word}?]", rng), "-".join(word)


def list_things(rng: random.Random) -> Pair:
    """Return an instruction to list a number of things and the list."""
    category = pick(rng, list(CATEGORIES))
    number = rng.choice((2, 3, 3, 3, 4, 5))
    items = rng.sample(CATEGORIES[category], number)
    verb = pick(rng, ["List", "List", "Name", "Tell me"])
    amount = NUMBER_WORDS[number] if rng.random() < 0.8 else str(number)
    if verb == "List" and rng.random() < 0.5:
        return f"List {amount} {category}.", "\n".join(f"{place}. {item}" for place, item in enumerate(items, 1))
    return f"{verb} {amount} {category}.", ", ".join(items)


def repeat(rng: random.Random) -> Pair:
    """Return an instruction to copy words, which trains attention to earlier text."""
    pool = ANIMALS + OBJECTS + FRUITS + COLORS + ADJECTIVES + [any_name(rng), any_name(rng)]
    phrase = " ".join(rng.sample(pool, rng.randint(2, 6)))
    if rng.random() < 0.25:
        return f"Say {phrase} in reverse order.", " ".join(reversed(phrase.split()))
    return expand("[Repeat after me: |Say this: |Repeat: ]", rng) + phrase, phrase


def sentence(rng: random.Random) -> Pair:
    """Return an instruction to write one sentence about a noun."""
    noun = pick(rng, ANIMALS + OBJECTS)
    if noun in ANIMALS:
        tail = "[runs in the field|sleeps under a tree|likes to play|sits by the river|looks for food|eats {food}]"
    else:
        tail = "[is on the table|is very old|belongs to {name}|is in the box|was a gift from {name}]"
    slots = {"food": pick(rng, ["bread", "apples", "cheese", "berries"]), "name": any_name(rng)}
    text = expand(f"The [{'|'.join(COLORS + ADJECTIVES[:6])}] {noun} {tail}.", rng, slots)
    return f"Write a sentence about {article(noun)}.", text


def _record(rng: random.Random) -> tuple[dict[str, object], str, str]:
    """Return the fields of a record, a noun for the record, and a description in English."""
    roll = rng.random()
    name = any_name(rng)
    if roll < 0.5:
        age, city, job = rng.randint(5, 90), pick(rng, CITIES), pick(rng, JOBS)
        if rng.random() < 0.5:
            fields: dict[str, object] = {"name": name, "age": age, "city": city}
            text = expand(f"[{name} is {age} years old and lives in {city}.|{name}, age {age}, from {city}.]", rng)
        else:
            fields = {"name": name, "age": age, "job": job}
            text = expand(f"[{name} is {age} years old and works as {article(job)}.|{name}, age {age}, {job}.]", rng)
        return fields, "person", text
    if roll < 0.8:
        item, color, price = pick(rng, OBJECTS), pick(rng, COLORS), rng.randint(1, 99)
        stock = rng.random() < 0.5
        fields = {"item": item, "color": color, "price": price, "in_stock": stock}
        text = (
            f"{article(f'{color} {item}').capitalize()} costs {price} dollars and is {'' if stock else 'not '}in stock."
        )
        return fields, "item", text
    animal, number = pick(rng, ANIMALS), rng.randint(1, 20)
    likes = rng.sample(["milk", "nuts", "fish", "music", "rain", "snow", "sun", "games"], 2)
    text = f"{name} is {article(animal)}, {number} years old, and likes {join_and(likes)}."
    return {"name": name, "kind": animal, "age": number, "likes": likes}, "animal", text


def json_record(rng: random.Random) -> Pair:
    """Return a request for a JSON record of a described person, animal or thing, and the record."""
    fields, noun, text = _record(rng)
    request = pick(rng, [f"Write a JSON record for this {noun}: ", f"Write this {noun} as JSON: ", "Convert to JSON: "])
    return request + text, json.dumps(fields)


def invented_record(rng: random.Random) -> Pair:
    """Return an open request for any JSON record and one possible record."""
    fields, noun, _ = _record(rng)
    return pick(rng, [f"Write a JSON record for {article(noun)}.", f"Give me JSON for {article(noun)}."]), json.dumps(
        fields
    )


def json_list(rng: random.Random) -> Pair:
    """Return a request for a JSON list of things and the list."""
    category = pick(rng, list(CATEGORIES))
    number = rng.choice((2, 3, 3, 4))
    items = rng.sample(CATEGORIES[category], number)
    return f"Write a JSON list of {NUMBER_WORDS[number]} {category}.", json.dumps(items)
