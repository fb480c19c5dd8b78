"""A checkpoint read as far as a rank needs it before it has a number: everything but experts."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from penstock_enginecore.experts.layer import DispatchedExperts
from penstock_enginecore.experts.plan import expert_modules, num_experts_of
from penstock_enginecore.models.quantization.weights import StoredTensor

_ONE_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class _Rows:
    """Some rows of a tensor of a file, each an expert's, read when it is asked for."""

    def __init__(self, tensor: StoredTensor, rows: Sequence[int]) -> None:
        self._tensor = tensor
        self._rows = rows
        self.shape = (len(rows), *tensor.get_shape()[1:])

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The rows, or a part of them."""
        return torch.cat([self._tensor[row : row + 1] for row in self._rows])[index]


class ExpertShare:
    """What a rank reads of a model of ``model_class`` and ``config`` before it is in a group: all but experts, and the first
    expert of each layer for every slot, to see that what computes them does. ``slots``: of a number of experts, room for how
    many. Raises ModelLoadError for a model whose experts cannot be shared, and what ``slots`` raises.
    """

    def __init__(
        self, model_class: type[PreTrainedModel], config: PretrainedConfig, slots: Callable[[int], int]
    ) -> None:
        make: Any = model_class
        with torch.device("meta"):
            skeleton = make._from_config(config)
        found = expert_modules(skeleton)
        self.model_class, self.config = model_class, config
        self.names = list(found)
        """Of the modules of experts, in order."""
        self._class = type(next(iter(found.values())))
        self.num_experts = num_experts_of(next(iter(found.values())))
        self.slots = slots(self.num_experts)
        self._index = {_layer_of(name): index for index, name in enumerate(self.names)}

    def tensors(self, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
        """Those of the files that a model that is made small has, experts by the numbers of their slots."""
        held = (0,) * self.slots
        found: dict[str, Any] = {}
        for name, tensor in stored.items():
            found.update({name: tensor} if self._layer(name, tensor) is None else _in_slots(name, tensor, held))
        return found

    def experts_of(self, layer: int, experts: Sequence[int], stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
        """Of the files' tensors what makes these ``experts`` of a layer, numbered from 0 on."""
        found: dict[str, Any] = {}
        for name, tensor in stored.items():
            if self._layer(name, tensor) == layer:
                found.update(_in_slots(name, tensor, experts))
        return found

    @contextmanager
    def made_small(self) -> Iterator[None]:
        """Experts that are made within the ``with`` block have room for this rank's slots alone."""
        experts: Any = self._class
        whole, slots = experts.__init__, self.slots

        def make(module: Any, *args: Any, **kwargs: Any) -> None:
            whole(module, *args, **kwargs)
            for name, weight in list(module.named_parameters(recurse=False)):
                small = torch.nn.Parameter(weight.new_empty(slots, *weight.shape[1:]), requires_grad=False)
                setattr(module, name, small)
            module.num_experts = slots

        experts.__init__ = make
        try:
            yield
        finally:
            experts.__init__ = whole

    def install(self, module: PreTrainedModel) -> list[DispatchedExperts]:
        """Put layers that dispatch in the place of the experts of a model that was made small."""
        layers = []
        for index, name in enumerate(self.names):
            held = (0,) * self.slots
            layers.append(DispatchedExperts(index, self.num_experts, module.get_submodule(name), held))
            module.set_submodule(name, layers[-1])
        return layers

    def _layer(self, name: str, tensor: StoredTensor) -> int | None:
        """Which layer's experts a tensor of a file is of; None where it is of none."""
        layer = self._index.get(_layer_of(name))
        if layer is None or _ONE_EXPERT.fullmatch(name):
            return layer
        shape = tensor.get_shape()
        stacked = bool(shape) and shape[0] == self.num_experts and (len(shape) == 3 or ".experts." in name)
        return layer if stacked else None


def _in_slots(name: str, tensor: StoredTensor, held: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """What a tensor of experts has of those that are ``held``, by its names there."""
    single = _ONE_EXPERT.fullmatch(name)
    if single is None:
        yield name, _Rows(tensor, held)
        return
    before, expert, behind = single.groups()
    for slot, each in enumerate(held):
        if each == int(expert):
            yield f"{before}{slot}{behind}", tensor


def _layer_of(name: str) -> str:
    found = _LAYER.search(name)
    return found.group(1) if found else name
