"""Texts other than stories: short descriptions, small recipes, opinions and four-line poems."""

from __future__ import annotations

import random

from words import ANIMALS, CITIES, COLORS, FOODS, HOBBIES, JOBS, OBJECTS, PLACES, any_name, article, expand, pick

DESCRIPTIONS = [
    "{name} [works as|is] {a_job} in {city}. [Every day|On Mondays], {name} gets up at "
    "{hour} and [drinks tea|eats {food}|reads the news]. [After work|In the evening], {name} "
    "likes to {hobby}.",
    "The weather in {city} is [sunny|cold|warm|rainy|windy] today. [People|Many people] "
    "[stay at home|walk in the park|wear a coat|sit outside]. Tomorrow it will be "
    "[better|colder|warmer|the same].",
    "[The market|The shop] in {city} sells {food}, {food2} and {a_color_thing}. [It "
    "opens|The doors open] at {hour}. {name} [goes there|buys {food}] [every week|every "
    "day|on Sunday].",
    "My [friend|sister|brother] {name} has {a_animal}. It is [big|small|old|young] and "
    "{color}. It likes to eat {food} and [sleep in the sun|play with a {thing}|run in the "
    "garden].",
    "The {color} {thing} [is|stands|lies] [on the table|near the window|under the chair]. It "
    "belongs to {name}, {a_job} from {city}. [Nobody knows|Everybody knows] how old it is.",
    "[In the morning|In winter|In summer|At night], the town is [quiet|busy|beautiful]. [The "
    "sun rises over the hills|Snow covers the roofs|The lights go on]. {A_animal} [walks "
    "down the street|sits on the wall|looks for food].",
    "The {animal} and the {animal2} [are friends|live {place}|do not like each other]. The "
    "{animal} likes {food}, but the {animal2} likes {food2}. [They often|They never] "
    "[share|play together|eat together].",
]
RECIPES = {
    "tea": ["Boil the water", "Put the tea in a cup", "Pour the hot water", "Wait for three minutes"],
    "soup": ["Cut the carrots", "Boil the water", "Add the carrots and salt", "Cook it for ten minutes"],
    "a sandwich": ["Take two slices of bread", "Put cheese on the bread", "Add some tomato", "Close the sandwich"],
    "a cake": ["Mix flour, eggs and sugar", "Put it in a pan", "Bake it in the oven", "Let it cool down"],
    "rice": ["Wash the rice", "Boil the water", "Add the rice", "Cook it until it is soft"],
    "a salad": ["Wash the vegetables", "Cut them small", "Add oil and salt", "Mix it well"],
    "a paper boat": ["Take a sheet of paper", "Fold it in half", "Fold the corners down", "Open it from below"],
}
POEMS = [
    "The [sun|moon] is [bright|high], the sky is [blue|wide],\n[I see|there is] {a_animal} by "
    "my side.\n[It sings|We sing] a song, it knows the way,\n[and we are|we are so] happy all "
    "the day.",
    "A [little|small] {animal} sat on a [tree|wall],\nit was not big, it was not "
    "[tall|small].\nIt saw a {thing} down in the [snow|grass],\n[and said hello|and said good "
    "day] to all who pass.",
    "[Snow|Rain] falls [softly|slowly] in the night,\n[every|one] star gives a little light.\n"
    "The {animal} sleeps, the {animal2} too,\n[and I will|I will] dream a dream of you.",
]


def _slots(rng: random.Random) -> dict[str, str]:
    animal, food, thing, color = pick(rng, ANIMALS), pick(rng, FOODS), pick(rng, OBJECTS), pick(rng, COLORS)
    return {
        "name": any_name(rng), "a_job": article(pick(rng, JOBS)), "city": pick(rng, CITIES),
        "hobby": pick(rng, HOBBIES),
        "food": food, "food2": pick(rng, [other for other in FOODS if other != food]), "thing": thing, "color": color,
        "animal": animal, "animal2": pick(rng, [other for other in ANIMALS if other != animal]),
        "a_animal": article(animal),
        "A_animal": article(animal).capitalize(), "a_color_thing": article(f"{color} {thing}"),
        "place": pick(rng, PLACES),
        "hour": pick(rng, ["six", "seven", "eight", "nine"]),
    }  # fmt: skip


def description(rng: random.Random) -> str:
    """Return a short description of a person, a town, an animal or a thing."""
    return expand(pick(rng, DESCRIPTIONS), rng, _slots(rng))


def poem(rng: random.Random) -> tuple[str, str]:
    """Return a request for a poem, and four lines of verse about the requested animal."""
    slots = _slots(rng)
    about = f" about {slots['a_animal']}" if rng.random() < 0.6 else ""
    return expand(f"[Write|Write me|Tell me] a [poem|short poem]{about}.", rng), expand(pick(rng, POEMS), rng, slots)


def recipe(rng: random.Random) -> tuple[str, str]:
    """Return a question about how to make a dish or an object, and numbered steps."""
    dish, steps = pick(rng, list(RECIPES.items()))
    text = "\n".join(f"{place}. {step}." for place, step in enumerate(steps, 1))
    return expand(f"[How do I make {dish}?|How do you make {dish}?|Tell me how to make {dish}.]", rng), text


def opinion(rng: random.Random) -> tuple[str, str]:
    """Return a question that has several possible answers, and one of these answers."""
    noun, options = pick(rng, [("color", COLORS), ("animal", ANIMALS), ("city", CITIES), ("food", FOODS)])
    answer = pick(rng, options)
    answer = f"the {answer}" if noun == "animal" else answer
    reason = {
        "color": "it makes me [happy|calm]", "animal": "it is so [clever|funny|brave|gentle]",
        "city": "it is [beautiful|old|full of music]", "food": "the taste is [good|wonderful|sweet]",
    }[noun]  # fmt: skip
    return f"What is your favorite {noun}?", expand(f"My favorite {noun} is {answer}, because {reason}.", rng)
