"""The models that a frontend serves, and the choice of the model of each request."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock_common.errors import InvalidArgument, NotFound, nearest, quoted
from penstock_frontend.calls.chat import ChatCalls
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.calls.scoring import ScoringCalls
from penstock_frontend.config import LoraConfig, ModelConfig
from penstock_frontend.speech.types import Speech

_LISTED = 16
"""Maximum number of names in an error message."""


class ServedModel(NamedTuple):
    """A model that a frontend serves, with the components that run its requests."""

    config: ModelConfig
    lora: LoraConfig
    llm: AsyncLLM
    chat: ChatCalls
    scoring: ScoringCalls
    labels: Sequence[str]
    """Names of the classes of a classification model, in the order of the class indices."""
    speech: Speech | None
    """Component that transcribes audio. None if the model does not transcribe."""

    @property
    def name(self) -> str:
        """Name of the model in requests."""
        return self.config.name


class ServedModels:
    """All models of a frontend. Requests choose a model by its name, by an alias, or by one of its LoRA adapters."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        """``models`` has at least one model. The names of the models and their aliases must be distinct."""
        self._models = tuple(models)
        if len(models) > 1:
            for model in models:
                model.llm.adapters.adapters.other_owner = functools.partial(self._owner, but=model)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def first(self) -> ServedModel:
        """Model in the setting ``model``."""
        return self._models[0]

    @property
    def names(self) -> list[str]:
        """Names of the models, without aliases and LoRA adapters."""
        return [model.name for model in self._models]

    def of(self, name: str, lora: str = "", *, field: str = "model", lora_field: str = "lora") -> ServedModel:
        """Return the model that a request names in ``name``, or the model of the LoRA adapter ``lora``.

        If this frontend has only one model, the result is this model, even if the model does not have this name. The
        model's own checks then refuse the name.

        Args:
            name: the requested model. May be empty.
            lora: the requested LoRA adapter. Used only if ``name`` is empty. May be empty.
            field: field of the request that contains ``name``, for errors.
            lora_field: field of the request that contains ``lora``, for errors.

        Raises:
            InvalidArgument: both names are empty, so that no model is chosen.
            NotFound: no model has this name.
        """
        if len(self._models) == 1:
            return self.first
        if not (asked := name or lora):
            raise InvalidArgument(
                f"{field} is empty, but this server has several models; set {field} to one of: {_listed(self.names)}",
                field=field,
                reason="MISSING_FIELD",
            )
        if (found := self._find(asked)) is not None:
            return found
        hint = nearest(asked, self._all_names())
        known = f"known: {_listed(self.names)}{hint}"
        asked_in = field if name else lora_field
        raise NotFound(f"{asked_in} is {quoted(asked)}; {known}", field=asked_in)

    def _find(self, name: str) -> ServedModel | None:
        """Return the model for which a name stands. Names from the configuration come before names of adapters that
        were added later.
        """
        fixed = (model for model in self._models if model.llm.adapters.adapters.is_fixed(name))
        adapters = (model for model in self._models if model.llm.adapters.adapters.get(name) is not None)
        return next(fixed, None) or next(adapters, None)

    def _owner(self, name: str, *, but: ServedModel) -> str:
        found = self._find(name)
        return "" if found is None or found is but else found.name

    def _all_names(self) -> Iterator[str]:
        for model in self._models:
            adapters = model.llm.adapters.adapters
            yield from (model.name, *adapters.aliases, *adapters.names)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
