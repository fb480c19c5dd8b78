import pytest

from penstock_common.errors import ConfigError
from penstock_frontend.config import FrontendConfig, LoraConfig, ModelConfig


def config(aliases: dict[str, str], **lora: object) -> FrontendConfig:
    model = ModelConfig(path="/models/tiny", aliases=aliases)
    return FrontendConfig(model=model, lora=LoraConfig(**lora), engines=("localhost:1",))  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["", "tiny", "pirate"])
def test_an_alias_stands_for_the_model_or_an_adapter(target: str) -> None:
    config({"claude-haiku-4-5": target}, adapters={"pirate": "/pirate"})


@pytest.mark.parametrize("lora", [{"enabled": True}, {"directory": "/adapters"}])
def test_an_alias_may_stand_for_an_adapter_that_comes_later(lora: dict[str, object]) -> None:
    config({"gpt-4o": "later"}, **lora)


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ({"": "tiny"}, "model.aliases: the name '' is empty"),
        ({" a": "tiny"}, "model.aliases: the name ' a' must be printable"),
        ({"tiny": ""}, "model.aliases: 'tiny' is the model's own name"),
        ({"pirate": "tiny"}, "model.aliases: 'pirate' is also the name of a LoRA adapter in lora.adapters"),
        ({"a": "b", "b": "tiny"}, "model.aliases.a is 'b', which is an alias itself"),
    ],
)
def test_a_name_that_means_something_else_is_refused(aliases: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(aliases, adapters={"pirate": "/pirate"})
    assert str(error.value).startswith(message)


def test_an_alias_of_nothing_that_is_served_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="model.aliases.a is 'b', which is neither the model, 'tiny', nor a LoRA adapter"
    ):
        config({"a": "b"})
    with pytest.raises(ConfigError, match="neither the model, 'tiny', nor one of lora.adapters: pirate"):
        config({"a": "b"}, adapters={"pirate": "/pirate"})
