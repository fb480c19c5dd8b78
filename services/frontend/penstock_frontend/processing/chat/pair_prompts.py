"""Prompts of generative rerankers, such as Qwen3-Reranker, which read a query and a document in their chat template.

The template gets a message with the role ``query`` and a message with the role ``document``, as in sentence-transformers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_frontend.config import ModelConfig
from penstock_frontend.processing.chat.rendering import ChatRenderer
from penstock_frontend.processing.prompts.tokenizer import read_json, resolve

_QUERY, _DOCUMENT = "query", "document"
_TRIAL = ("zquery", "zdocument")
"""Texts of a trial pair, which must occur in its prompt."""
_NOT_SHOWN = (
    "the model generates scores, but its chat template does not write messages with the roles query and document; set "
    "frontend.model.chat_template to a template that does, or send complete prompts to /classify"
)
_OTHER_OPTIONS = frozenset({"restore_suffix", "truncation", "max_length", "padding"})
"""Options of sentence-transformers for templates that do not change the text."""


class PairPrompts:
    """Renders pairs of query and document.

    Args:
        renderer: Renderer of the model's chat template.
        options: Additional variables for the template.
    """

    def __init__(self, renderer: ChatRenderer, options: Mapping[str, Any]) -> None:
        self._renderer = renderer
        self._options = options
        self._shows_both: bool | None = None

    async def render(self, pairs: Sequence[tuple[str, str]], instruction: str = "") -> list[str]:
        """Return the prompt of each pair. ``instruction`` is the text of the system message, or empty for none. Raises
        InvalidArgument if the template does not write both texts, or refuses a pair.
        """
        if self._shows_both is None:
            [trial] = await self._rendered([_TRIAL], instruction)
            self._shows_both = all(text in trial for text in _TRIAL)
        if not self._shows_both:
            raise InvalidArgument(_NOT_SHOWN, field="model")
        return await self._rendered(pairs, instruction)

    async def _rendered(self, pairs: Sequence[tuple[str, str]], instruction: str) -> list[str]:
        system = [("system", instruction)] if instruction else []
        said = [[*system, (_QUERY, query), (_DOCUMENT, document)] for query, document in pairs]
        return await self._renderer.render_texts(said, self._options)


def load_pair_options(config: ModelConfig) -> dict[str, Any] | None:
    """Return the variables for the template of a model that generates, from ``sentence_bert_config.json``. Return None
    for a model that does not generate. Raises ConfigError if a file cannot be read.
    """
    folder = resolve(config)
    architectures: Any = read_json(folder / "config.json").get("architectures") or ()
    if not any(str(name).endswith("ForCausalLM") for name in architectures):
        return None
    file = folder / "sentence_bert_config.json"
    options: Any = read_json(file).get("processing_kwargs") or {}
    options = options.get("chat_template") or {} if isinstance(options, dict) else None
    if not isinstance(options, dict):
        raise ConfigError(f"{file}: processing_kwargs and its chat_template must be objects")
    return {name: value for name, value in options.items() if name not in _OTHER_OPTIONS}
