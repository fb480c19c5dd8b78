"""Pictures of coloured shapes on a plain ground, with questions about them.

``python pictures.py --seed 5 scene.png`` writes a picture and prints its questions.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

COLORS = {
    "red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220), "yellow": (240, 210, 40),
    "purple": (140, 50, 170), "orange": (245, 140, 30),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
GROUNDS = ((255, 255, 255), (225, 225, 225), (30, 30, 30))
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
PLACES = tuple("middle" if row == column == "middle" else f"{row} {column}" for row in ROWS for column in COLUMNS)
NUMBERS = ("no", "one", "two", "three", "four", "five")
MOST = 3

Question = tuple[str, str]
"""Question and answer."""


@dataclass(frozen=True)
class Thing:
    """A shape in one of the nine cells of a picture."""

    color: str
    shape: str
    place: str

    @property
    def name(self) -> str:
        """Return the color and shape with the indefinite article."""
        return f"{'an' if self.color[0] in 'aeiou' else 'a'} {self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """Shapes in a picture, in the order of the nine cells."""

    things: tuple[Thing, ...]
    seed: int
    """Seed of details about which no question asks: background, sizes, and each shape's offset from the middle of its
    cell.
    """

    @property
    def looks(self) -> list[tuple[int, int]]:
        """Return, for each of the nine cells, the numbers of the color and of the shape, from 1, or zeros for an empty
        cell.
        """
        looks = [(0, 0)] * len(PLACES)
        for thing in self.things:
            looks[PLACES.index(thing.place)] = 1 + list(COLORS).index(thing.color), 1 + SHAPES.index(thing.shape)
        return looks

    def draw(self, size: int) -> Image.Image:
        """Return the picture, ``size`` pixels wide and high."""
        rng = random.Random(self.seed)
        image = Image.new("RGB", (size, size), rng.choice(GROUNDS))
        pen = ImageDraw.Draw(image)
        cell = size / 3
        for thing in self.things:
            row, column = divmod(PLACES.index(thing.place), 3)
            radius = cell * rng.uniform(0.28, 0.42)
            slack = cell / 2 - radius
            x = (column + 0.5) * cell + rng.uniform(-slack, slack)
            y = (row + 0.5) * cell + rng.uniform(-slack, slack)
            _draw(pen, thing.shape, x, y, radius, COLORS[thing.color])
        return image


def _draw(pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, color: tuple[int, int, int]) -> None:
    match shape:
        case "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
        case "square":
            half = radius * 0.85
            pen.rectangle((x - half, y - half, x + half, y + half), fill=color)
        case "triangle":
            corners = [(x + radius * math.sin(turn), y - radius * math.cos(turn)) for turn in (0, 2.094, 4.189)]
            pen.polygon(corners, fill=color)
        case _:
            thin = radius * 0.3
            pen.rectangle((x - radius, y - thin, x + radius, y + thin), fill=color)
            pen.rectangle((x - thin, y - radius, x + thin, y + radius), fill=color)


def make_scene(rng: random.Random, most: int = MOST) -> Scene:
    """Return a scene of one to ``most`` shapes. No two shapes have both the same color and the same shape."""
    number = rng.randint(1, most)
    kinds = rng.sample([(color, shape) for color in COLORS for shape in SHAPES], number)
    places = sorted(rng.sample(range(9), number))
    things = tuple(Thing(color, shape, PLACES[place]) for (color, shape), place in zip(kinds, places, strict=True))
    return Scene(things, rng.getrandbits(32))


def _at(place: str) -> str:
    return "in the middle" if place == "middle" else f"at the {place}"


def _count(scene: Scene, _: random.Random) -> Question:
    number = len(scene.things)
    return "How many shapes are there?", f"There {'is one shape' if number == 1 else f'are {NUMBERS[number]} shapes'}."


def _count_color(scene: Scene, rng: random.Random) -> Question:
    color = rng.choice([thing.color for thing in scene.things] if rng.random() < 0.7 else list(COLORS))
    number = sum(thing.color == color for thing in scene.things)
    said = f"is one {color} shape" if number == 1 else f"are {NUMBERS[number]} {color} shapes"
    return f"How many {color} shapes are there?", f"There {said}."


def _color(scene: Scene, rng: random.Random) -> Question | None:
    counts = Counter(thing.shape for thing in scene.things)
    if not (unique := [thing for thing in scene.things if counts[thing.shape] == 1]):
        return None
    thing = rng.choice(unique)
    return f"What color is the {thing.shape}?", f"The {thing.shape} is {thing.color}."


def _shape(scene: Scene, rng: random.Random) -> Question | None:
    counts = Counter(thing.color for thing in scene.things)
    if not (unique := [thing for thing in scene.things if counts[thing.color] == 1]):
        return None
    thing = rng.choice(unique)
    return f"What shape is {thing.color}?", f"The {thing.color} shape is a {thing.shape}."


def _where(scene: Scene, rng: random.Random) -> Question:
    thing = rng.choice(scene.things)
    return f"Where is the {thing.color} {thing.shape}?", f"The {thing.color} {thing.shape} is {_at(thing.place)}."


def _what(scene: Scene, rng: random.Random) -> Question:
    place = rng.choice([thing.place for thing in scene.things] if rng.random() < 0.8 else PLACES)
    where = _at(place)
    found = next((thing.name for thing in scene.things if thing.place == place), "nothing")
    return f"What is {where}?", f"The {place} has {found}."


def _describe(scene: Scene, _: random.Random) -> Question | None:
    if len(scene.things) > MOST:
        return None
    seen = (f"{thing.name} {_at(thing.place)}" for thing in scene.things)
    return "Describe the picture.", f"There is {', '.join(seen)}."


KINDS: dict[str, Callable[[Scene, random.Random], Question | None]] = {
    "number": _count, "number of a color": _count_color, "color": _color, "shape": _shape, "place": _where, "what": _what,
    "description": _describe,
}  # fmt: skip

WEIGHTS = (1, 1, 1, 1, 2, 2, 1)
"""Relative frequency of each kind of question. Questions about positions are the hardest to learn."""


def ask(scene: Scene, rng: random.Random) -> Question:
    """Return a question about the scene with one right answer."""
    while (question := rng.choices(list(KINDS.values()), WEIGHTS)[0](scene, rng)) is None:
        pass
    return question


def main() -> None:
    """Write a picture, and print a question of each kind with its answer."""
    parser = argparse.ArgumentParser(description="Draw a scene.")
    parser.add_argument("file", type=Path, help="file to write, a PNG")
    parser.add_argument("--seed", type=int, default=1, help="another number is another scene")
    parser.add_argument("--size", type=int, default=240, help="pixels, wide and high")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    scene = make_scene(rng)
    scene.draw(options.size).save(options.file, "PNG")
    for kind in KINDS.values():
        if question := kind(scene, rng):
            print(*question)


if __name__ == "__main__":
    main()
