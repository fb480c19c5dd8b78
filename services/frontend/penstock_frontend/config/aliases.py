"""Other names of a model and of its LoRA adapters."""

from collections.abc import Mapping

from penstock_common.errors import ConfigError
from penstock_frontend.config.lora import LoraConfig, name_refusal


def check_aliases(aliases: Mapping[str, str], model: str, lora: LoraConfig) -> None:
    """Check the names in ``model.aliases`` against all other names.

    Args:
        aliases: the name that each of them stands for; empty: ``model``.
        model: the model's own name.
        lora: the adapters, some of which may get their names later.

    Raises:
        ConfigError: one cannot be a name, is the name of something else, or stands for nothing that is served.
    """
    for name, target in aliases.items():
        if refusal := name_refusal(name):
            raise ConfigError(f"model.aliases: the name {name!r} {refusal}")
        if name == model:
            raise ConfigError(f"model.aliases: {name!r} is the model's own name")
        if name in lora.adapters:
            raise ConfigError(
                f"model.aliases: {name!r} is the name of a LoRA adapter, in lora.adapters; leave one of them out"
            )
        if target in aliases:
            raise ConfigError(
                f"model.aliases.{name} is {target!r}, which is an alias itself; name what that stands for"
            )
        if target not in ("", model, *lora.adapters) and not (lora.enabled or lora.directory or lora.roots):
            adapters = f" nor one of lora.adapters: {', '.join(sorted(lora.adapters))}" if lora.adapters else ""
            raise ConfigError(
                f"model.aliases.{name} is {target!r}, which is neither the model, {model!r},{adapters or ' nor a LoRA adapter'}"
            )
