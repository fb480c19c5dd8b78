"""Reads adapters of the model that a worker loads, and keeps of them what the worker computes."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock_enginecore.config import LoraConfig
from penstock_enginecore.lora.adapter import LoraAdapter
from penstock_enginecore.lora.adapter_sharding import AdapterPart, OwnFeatures
from penstock_enginecore.lora.store import MakeReader, ReadAdapter


class Onlooker:
    """Is shown the modules of a model while it is loaded, maybe several times: what it was shown last counts."""

    def loaded(self, module: PreTrainedModel) -> None:
        """They are whole: neither split nor cut nor packed."""

    def split(self, features: Mapping[str, OwnFeatures]) -> None:
        """They were split; this rank has these features of linear layers."""

    def cut(self, module: PreTrainedModel) -> None:
        """The layers of other stages are gone."""


class AdapterReader(Onlooker):
    """A ``ReadAdapter``: of the whole adapter, of which the worker's part is given, under the whole's digest."""

    def __init__(self, make: MakeReader, config: LoraConfig) -> None:
        self._make = make
        self._config = config
        self._read: ReadAdapter | None = None
        self._part = AdapterPart()

    def loaded(self, module: PreTrainedModel) -> None:
        """Of this model."""
        self._read, self._part = self._make(module, self._config), AdapterPart()

    def split(self, features: Mapping[str, OwnFeatures]) -> None:
        """See ``OwnFeatures``."""
        self._part = AdapterPart(features, self._part.linears)

    def cut(self, module: PreTrainedModel) -> None:
        """Of the linear layers that are left."""
        named: Any = module.named_modules()
        linears = frozenset(name for name, child in named if isinstance(child, torch.nn.Linear))
        self._part = AdapterPart(self._part.features, linears)

    def __call__(self, path: str) -> LoraAdapter:
        """See ``ReadAdapter``. RuntimeError before a model was loaded."""
        if self._read is None:
            raise RuntimeError("a model must be loaded before its adapters are read")
        return self._part.of(self._read(path))
