"""Scenes of the vision demo model: pictures show the requested scene, and answers are right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.example_modules import example_modules

FOLDER = Path(__file__).resolve().parents[4] / "examples" / "demo_model"


@pytest.fixture(scope="module")
def pictures() -> Iterator[SimpleNamespace]:
    with example_modules(FOLDER, ["pictures"]) as modules:
        yield modules.pictures


def scenes(pictures: SimpleNamespace, seed: int, count: int) -> list[Any]:
    rng = random.Random(seed)
    return [pictures.make_scene(rng) for _ in range(count)]


def test_each_place_has_the_color_of_what_lies_there(pictures: SimpleNamespace) -> None:
    for scene in scenes(pictures, 1, 100):
        image = scene.draw(90)
        colors = dict.fromkeys(pictures.PLACES, "") | {thing.place: thing.color for thing in scene.things}
        for index, color in enumerate(colors.values()):
            row, column = divmod(index, 3)
            cell = image.crop((30 * column, 30 * row, 30 * column + 30, 30 * row + 30))
            seen = {pixel for _, pixel in cell.getcolors()}
            assert seen <= {*pictures.GROUNDS, *filter(None, [pictures.COLORS.get(color)])}
            assert (pictures.COLORS.get(color) in seen) == bool(color)
            assert (scene.looks[index][0] == 0) == (not color)


def test_shapes_of_one_size_cover_different_areas(pictures: SimpleNamespace) -> None:
    areas = set()
    for shape in pictures.SHAPES:
        scene = pictures.Scene((pictures.Thing("red", shape, "middle"),), 5)
        areas.add(sum(count for count, pixel in scene.draw(240).getcolors() if pixel == pictures.COLORS["red"]))
    assert len(areas) == len(pictures.SHAPES)


def test_the_same_scene_is_the_same_picture_at_each_drawing(pictures: SimpleNamespace) -> None:
    for scene in scenes(pictures, 2, 20):
        assert scene.draw(72).tobytes() == scene.draw(72).tobytes()


def test_numbers_are_those_of_the_things(pictures: SimpleNamespace) -> None:
    rng = random.Random(3)
    for scene in scenes(pictures, 3, 200):
        number = pictures.NUMBERS[len(scene.things)]
        assert f" {number} shape" in pictures.KINDS["number"](scene, rng)[1]
        question, answer = pictures.KINDS["number of a color"](scene, rng)
        color = question.split()[2]
        assert f" {pictures.NUMBERS[sum(thing.color == color for thing in scene.things)]} {color} " in answer


def test_a_question_after_something_has_one_answer_in_the_scene(pictures: SimpleNamespace) -> None:
    rng = random.Random(4)
    for scene in scenes(pictures, 4, 300):
        if asked := pictures.KINDS["color"](scene, rng):
            shape = asked[0].rstrip("?").split()[-1]
            assert asked[1] == f"The {shape} is {next(t.color for t in scene.things if t.shape == shape)}."
        if asked := pictures.KINDS["shape"](scene, rng):
            color = asked[0].rstrip("?").split()[-1]
            assert [t.shape for t in scene.things if t.color == color] == [asked[1].rstrip(".").split()[-1]]
