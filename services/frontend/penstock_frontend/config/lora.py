"""LoRA adapters, and other names of a model and of its adapters."""

import posixpath
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.errors import ConfigError

MAX_NAME_LENGTH = 256
"""Of an adapter's name, in characters."""
MAX_PATH_LENGTH = 4096


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters that requests may name. Paths are those on the engines' machines."""

    enabled: Annotated[
        bool, Meta(description="Serve LoRA adapters; lora.adapters and lora.directory mean that, too.")
    ] = False
    adapters: Annotated[
        dict[str, str], Meta(description="Directories of adapters by the names that requests use.")
    ] = {}
    directory: Annotated[
        str,
        Meta(
            description="A directory that the frontend and all engines have at this path, and each of whose subdirectories is an "
            "adapter of that name, as they come and go; empty: none."
        ),
    ] = ""
    scan_interval: Annotated[
        float, Meta(ge=0.05, le=3600, description="Seconds between two looks at lora.directory.")
    ] = 2.0
    roots: Annotated[
        tuple[str, ...],
        Meta(
            description="Directories below which adapters lie that may be loaded while requests are served; empty: none may."
        ),
    ] = ()
    max_registered: Annotated[
        int, Meta(ge=1, le=16_384, description="Adapters that can have a name at once, wherever the names come from.")
    ] = 1024
    http_loading: Annotated[
        bool,
        Meta(
            description="Serve /v1/load_lora_adapter and /v1/unload_lora_adapter on the HTTP listener, for callers with the "
            "scope admin, or for everybody where nobody is asked who they are."
        ),
    ] = False

    def __post_init__(self) -> None:
        check_fields("lora", self)
        for name, path in self.adapters.items():
            if refusal := name_refusal(name):
                raise ConfigError(f"lora.adapters: the name {name!r} {refusal}")
            if not path:
                raise ConfigError(f"lora.adapters.{name} is required")
        if len(self.adapters) > self.max_registered:
            raise ConfigError(
                f"lora.adapters has {len(self.adapters)} names; lora.max_registered is {self.max_registered}"
            )
        for root in self.roots:
            if not posixpath.isabs(root):
                raise ConfigError(f"lora.roots: {root!r} must be an absolute path")
        if self.http_loading and not self.serves:
            raise ConfigError("lora.http_loading is true; it needs lora.enabled")

    @property
    def serves(self) -> bool:
        """Whether requests may name adapters."""
        return self.enabled or bool(self.adapters) or bool(self.directory)

    def allows(self, path: str) -> bool:
        """Whether an adapter may be loaded from ``path`` at run time: it lies below a root. Links are not looked at: they are on
        the engines' machines.
        """
        normal = posixpath.normpath(path)
        return posixpath.isabs(path) and any(
            normal.startswith(posixpath.normpath(root).rstrip("/") + "/") for root in self.roots
        )


def name_refusal(name: str) -> str:
    """Why this cannot be an adapter's name; empty where it can."""
    if not name:
        return "is empty"
    if len(name) > MAX_NAME_LENGTH:
        return f"has {len(name)} characters; it must have at most {MAX_NAME_LENGTH}"
    return "" if name.isprintable() and name == name.strip() else "must be printable, without spaces around it"


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
