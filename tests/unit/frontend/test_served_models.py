"""Choice of a model by the names in a request."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock_common.errors import InvalidArgument, NotFound
from penstock_frontend.config import LoraConfig, ModelConfig
from penstock_frontend.dispatch.adapters import Adapters
from penstock_frontend.served_models import ServedModel, ServedModels


def served(name: str, *, aliases: dict[str, str] | None = None, adapters: dict[str, str] | None = None) -> ServedModel:
    model = ModelConfig(path=f"/m/{name}", aliases=aliases or {})
    lora = LoraConfig(adapters=adapters or {}, roots=("/a",), enabled=True)
    names = Adapters(lora, model=name, aliases=model.aliases, frontend_id="f")
    llm: Any = SimpleNamespace(adapters=SimpleNamespace(adapters=names))
    unused: Any = None
    return ServedModel(config=model, lora=lora, llm=llm, chat=unused, scoring=unused, labels=(), speech=None)


@pytest.fixture
def two() -> ServedModels:
    right = served("right", aliases={"second": "", "later": "later-adapter"}, adapters={"pirate": "/a/pirate"})
    return ServedModels([served("left", aliases={"first": ""}), right])


@pytest.mark.parametrize(
    ("name", "lora", "model"),
    [
        ("left", "", "left"),
        ("first", "", "left"),
        ("right", "", "right"),
        ("second", "", "right"),
        ("later", "", "right"),
        ("pirate", "", "right"),
        ("", "pirate", "right"),
        ("left", "pirate", "left"),
    ],
)
def test_names_choose_the_model(two: ServedModels, name: str, lora: str, model: str) -> None:
    assert two.of(name, lora).name == model


def test_an_unknown_name_gets_the_names_and_the_nearest_one(two: ServedModels) -> None:
    with pytest.raises(NotFound, match=r"name is 'secnd'; known: left, right; did you mean 'second'\?") as info:
        two.of("secnd", field="name")
    assert info.value.field == "name"
    with pytest.raises(NotFound, match=r"lora is 'pirat'; known: left, right; did you mean 'pirate'\?"):
        two.of("", "pirat")


def test_an_empty_name_is_allowed_only_for_one_model(two: ServedModels) -> None:
    with pytest.raises(InvalidArgument, match="model is empty, but this server has several models; .*: left, right"):
        two.of("")
    one = ServedModels([served("left")])
    assert {one.of(name).name for name in ("", "left", "other")} == {"left"}  # the model itself refuses other names


def test_a_long_list_of_models_is_shortened() -> None:
    many = ServedModels([served(f"m{number}") for number in range(18)])
    with pytest.raises(InvalidArgument, match="m0, m1, .*, m15 and 2 more$"):
        many.of("")


def test_an_adapter_cannot_take_the_name_of_another_model(two: ServedModels) -> None:
    left, right = two
    for name in ("right", "second", "pirate"):
        with pytest.raises(InvalidArgument, match="already stands for the model 'right' or one of its adapters"):
            left.llm.adapters.adapters.check_registrable(name)
    right.llm.adapters.adapters.check_registrable("new")
