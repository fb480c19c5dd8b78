"""Registry of parsers by name, and choice of the parsers by the model's chat template."""

import importlib.metadata
from typing import NamedTuple, TypeVar

from penstock_common.errors import ConfigError, nearest
from penstock_frontend.processing.parsers.base import ReasoningParser, ToolParser
from penstock_frontend.processing.parsers.deepseek import (
    DeepSeekR1ReasoningParser,
    DeepSeekV3ToolParser,
    DeepSeekV31ToolParser,
)
from penstock_frontend.processing.parsers.gemma3 import Gemma3ToolParser
from penstock_frontend.processing.parsers.glm45 import Glm45ToolParser
from penstock_frontend.processing.parsers.gpt_oss import GptOssReasoningParser, GptOssToolParser
from penstock_frontend.processing.parsers.granite import GraniteReasoningParser, GraniteToolParser
from penstock_frontend.processing.parsers.hermes import HermesToolParser
from penstock_frontend.processing.parsers.kimi_k2 import KimiK2ToolParser
from penstock_frontend.processing.parsers.llama3_json import Llama3JsonToolParser
from penstock_frontend.processing.parsers.llama4_pythonic import Llama4PythonicToolParser
from penstock_frontend.processing.parsers.mistral import MistralReasoningParser, MistralToolParser
from penstock_frontend.processing.parsers.phi4 import Phi4ToolParser
from penstock_frontend.processing.parsers.qwen3_coder import Qwen3CoderToolParser
from penstock_frontend.processing.parsers.reasoning_tags import Qwen3ReasoningParser

ENTRY_POINTS = "penstock.parsers"
AUTO, NONE = "auto", "none"

_TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3ToolParser,
    "deepseek_v31": DeepSeekV31ToolParser,
    "gemma3": Gemma3ToolParser,
    "glm45": Glm45ToolParser,
    "gpt_oss": GptOssToolParser,
    "granite": GraniteToolParser,
    "hermes": HermesToolParser,
    "kimi_k2": KimiK2ToolParser,
    "llama3_json": Llama3JsonToolParser,
    "llama4_pythonic": Llama4PythonicToolParser,
    "mistral": MistralToolParser,
    "phi4": Phi4ToolParser,
    "qwen3_coder": Qwen3CoderToolParser,
}
_REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1ReasoningParser,
    "gpt_oss": GptOssReasoningParser,
    "granite": GraniteReasoningParser,
    "mistral": MistralReasoningParser,
    "qwen3": Qwen3ReasoningParser,
}

P = TypeVar("P", ToolParser, ReasoningParser)


class Parsers(NamedTuple):
    """Parser classes of a model. None means that outputs are not parsed for tool calls, or not for reasoning."""

    tool: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None


def pick(*, tool: str, reasoning: str, template: str) -> Parsers:
    """Return the parsers with these names.

    The name ``auto`` selects the first parser that fits the chat template. The parsers of plugins are tried after the
    built-in parsers.

    Raises ConfigError if there is no parser with a given name.
    """
    tools, reasonings = _known()
    return Parsers(
        _pick("model.tool_parser", tool, tools, template),
        _pick("model.reasoning_parser", reasoning, reasonings, template),
    )


def tool_parser_names() -> list[str]:
    """Return the names of all tool parsers, without ``auto`` and ``none``.

    Raises ConfigError if a plugin is not valid.
    """
    return sorted(_known()[0])


def reasoning_parser_names() -> list[str]:
    """Return the names of all reasoning parsers, without ``auto`` and ``none``.

    Raises ConfigError if a plugin is not valid.
    """
    return sorted(_known()[1])


def _known() -> tuple[dict[str, type[ToolParser]], dict[str, type[ReasoningParser]]]:
    """Return all parsers by name. The parser of a plugin cannot replace a built-in parser."""
    tools, reasonings = dict(_TOOL_PARSERS), dict(_REASONING_PARSERS)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            plugin = point.load()
        except Exception as e:  # the module of the plugin may raise any error
            raise ConfigError(f"plugin {point.name!r} of {ENTRY_POINTS} cannot be loaded: {e}") from e
        if isinstance(plugin, type) and issubclass(plugin, ToolParser):
            tools.setdefault(point.name, plugin)
        elif isinstance(plugin, type) and issubclass(plugin, ReasoningParser):
            reasonings.setdefault(point.name, plugin)
        else:
            raise ConfigError(f"plugin {point.name!r} of {ENTRY_POINTS} is neither a ToolParser nor a ReasoningParser")
    return tools, reasonings


def _pick(field: str, name: str, known: dict[str, type[P]], template: str) -> type[P] | None:
    if name == NONE:
        return None
    if name == AUTO:
        return next((parser for parser in known.values() if parser.fits(template)), None)
    if name not in known:
        names = [AUTO, NONE, *sorted(known)]
        raise ConfigError(f"{field} is {name!r}; known: {', '.join(names)}{nearest(name, names)}")
    return known[name]
