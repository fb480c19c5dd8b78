"""Settings of the models that a frontend serves: their files and parsers, their LoRA adapters, and the names that
requests use.
"""

import posixpath
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields, model_name
from penstock_common.errors import ConfigError

MAX_NAME_LENGTH = 256
"""Maximum length of the name of a LoRA adapter, in characters."""
MAX_PATH_LENGTH = 4096


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for LoRA adapters that requests may name. All paths name files on the engines' machines."""

    enabled: Annotated[
        bool, Meta(description="Serve LoRA adapters. Setting lora.adapters or lora.directory also enables this.")
    ] = False
    adapters: Annotated[
        dict[str, str],
        Meta(description="LoRA adapters to serve: a map from the name that requests use to the adapter's directory."),
    ] = {}
    directory: Annotated[
        str,
        Meta(
            description=(
                "Directory with one subdirectory per LoRA adapter; the subdirectory's name is the adapter's name. "
                "The path must be the same on the frontend and on all engines. Adapters may be added and removed "
                "while requests are served. Empty: no such directory."
            )
        ),
    ] = ""
    scan_interval: Annotated[
        float, Meta(ge=0.05, le=3600, description="Seconds between two scans of lora.directory.")
    ] = 2.0
    roots: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Directories from which adapters may be loaded at run time, including all their subdirectories. "
                "Empty: adapters cannot be loaded at run time."
            )
        ),
    ] = ()
    max_registered: Annotated[
        int,
        Meta(ge=1, le=16_384, description="Maximum number of registered LoRA adapters, from all sources together."),
    ] = 1024
    http_loading: Annotated[
        bool,
        Meta(
            description=(
                "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter on the HTTP listener. Callers need the "
                "scope admin; if authentication is off, every caller may use them."
            )
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
                f"lora.adapters has {len(self.adapters)} names; the limit lora.max_registered is {self.max_registered}"
            )
        for root in self.roots:
            if not posixpath.isabs(root):
                raise ConfigError(f"lora.roots: {root!r} must be an absolute path")
        if self.http_loading and not self.serves:
            raise ConfigError("lora.http_loading is true, but LoRA adapters are off; set lora.enabled to true")

    @property
    def serves(self) -> bool:
        """True if requests may name LoRA adapters."""
        return self.enabled or bool(self.adapters) or bool(self.directory)

    def allows(self, path: str) -> bool:
        """Return True if an adapter may be loaded from ``path`` at run time, because the path is below one of
        ``roots``.

        The check does not resolve symbolic links, because the files are on the engines' machines.
        """
        normal = posixpath.normpath(path)
        return posixpath.isabs(path) and any(
            normal.startswith(posixpath.normpath(root).rstrip("/") + "/") for root in self.roots
        )


def name_refusal(name: str) -> str:
    """Return the reason why ``name`` cannot be the name of a LoRA adapter. Return an empty string if the name is valid."""
    if not name:
        return "is empty"
    if len(name) > MAX_NAME_LENGTH:
        return f"has {len(name)} characters; it must have at most {MAX_NAME_LENGTH}"
    return "" if name.isprintable() and name == name.strip() else "must be printable, without spaces around it"


def check_aliases(aliases: Mapping[str, str], model: str, lora: LoraConfig) -> None:
    """Check that the aliases in ``model.aliases`` do not conflict with other names.

    Args:
        aliases: map from each alias to the name that it stands for. An empty value means ``model``.
        model: the name of the model.
        lora: the LoRA settings. Some adapters may get their names later, at run time.

    Raises:
        ConfigError: an alias is not a valid name, is already taken, or refers to a name that is not served.
    """
    for name, target in aliases.items():
        if refusal := name_refusal(name):
            raise ConfigError(f"model.aliases: the name {name!r} {refusal}")
        if name == model:
            raise ConfigError(f"model.aliases: {name!r} is the model's own name")
        if name in lora.adapters:
            raise ConfigError(
                f"model.aliases: {name!r} is also the name of a LoRA adapter in lora.adapters; remove one of the two"
            )
        if target in aliases:
            raise ConfigError(
                f"model.aliases.{name} is {target!r}, which is an alias itself; set the name that this alias stands for"
            )
        if target not in ("", model, *lora.adapters) and not (lora.enabled or lora.directory or lora.roots):
            adapters = f" nor one of lora.adapters: {', '.join(sorted(lora.adapters))}" if lora.adapters else ""
            raise ConfigError(
                f"model.aliases.{name} is {target!r}, which is neither the model, {model!r},{adapters or ' nor a LoRA adapter'}"
            )


SpecialTokensInContent = Literal["parse", "text"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for the model's tokenizer, generation config, chat template and output parsers."""

    path: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "Hugging Face checkpoint directory or hub id. The frontend reads its tokenizer and generation config."
            ),
        ),
    ]
    served_model_name: Annotated[
        str, Meta(description="Model name that clients use. Empty: the last part of the path or hub id.")
    ] = ""
    aliases: Annotated[
        dict[str, str],
        Meta(
            description=(
                "Additional model names for requests: a map from each alias to the model's name or to the name of a "
                "LoRA adapter. An empty value means the model."
            )
        ),
    ] = {}
    revision: Annotated[str, Meta(description="Branch, tag or commit on the hub. Empty: the default branch.")] = ""
    tool_parser: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "Parser for tool calls in chat outputs: deepseek_v3, deepseek_v31, gemma3, glm45, gpt_oss, "
                "granite, hermes, kimi_k2, llama3_json, llama4_pythonic, mistral, phi4, qwen3_coder, none, or the "
                "name of a plugin's parser. auto chooses by the model's chat template."
            ),
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "Parser for reasoning in chat outputs: deepseek_r1, gpt_oss, granite, mistral, qwen3, none, "
                "or the name of a plugin's parser. auto chooses by the model's chat template."
            ),
        ),
    ] = "auto"
    chat_template: Annotated[
        str,
        Meta(
            description=(
                "File with a jinja2 chat template that replaces the model's own templates. Empty: the model's own "
                "templates."
            )
        ),
    ] = ""
    request_chat_templates: Annotated[
        bool,
        Meta(
            description=(
                "Allow requests to bring their own chat template (chat_template of chat completions and of "
                "tokenization). The template runs in a sandbox in a separate process for at most 2 seconds. false: such "
                "requests are refused."
            )
        ),
    ] = False
    special_tokens_in_content: Annotated[
        SpecialTokensInContent,
        Meta(
            description=(
                "Handling of special tokens, such as <|im_end|>, in the text of chat messages and tools. parse: "
                "the text becomes the special token, so a message can end its turn and begin another. text: the "
                "text is tokenized as ordinary characters."
            )
        ),
    ] = "parse"

    def __post_init__(self) -> None:
        check_fields("model", self)

    @property
    def name(self) -> str:
        """Name of the model, by which clients request it."""
        return model_name(self.path, self.served_model_name)


# The code below is for frontends with several models.

MAX_MODELS = 16
"""Maximum number of models of one frontend."""


class FurtherModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that a frontend serves in addition to the model in the section ``model``.

    ``pools`` and ``engines`` find the engines of this model, as ``coordinator.pools`` and ``engines`` do for the first
    model. All other settings of the frontend apply to every model.
    """

    model: ModelConfig
    pools: tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...] = ()
    engines: tuple[str, ...] = ()
    lora: LoraConfig = LoraConfig()


def check_distinct(models: Sequence[tuple[str, ModelConfig, LoraConfig]]) -> None:
    """Check that each name which requests can use stands for only one model.

    Args:
        models: the models, each with the prefix of its settings in error messages, its settings and its LoRA settings.

    Raises:
        ConfigError: a name of one model, alias or LoRA adapter is also a name of another model.
    """
    owners: dict[str, str] = {}
    for prefix, model, lora in models:
        sources = {
            **dict.fromkeys(lora.adapters, f"{prefix}lora.adapters"),
            **dict.fromkeys(model.aliases, f"{prefix}model.aliases"),
            model.name: f"the name of the model in {prefix}model",
        }
        for name, source in sources.items():
            if (other := owners.get(name)) is not None:
                raise ConfigError(
                    f"the name {name!r} is used twice: by {other}, and by {source}; give each model, alias and LoRA "
                    "adapter its own name"
                )
        owners |= sources
