"""A checkpoint read as far as one rank needs it: everything but the experts that others hold."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from penstock_enginecore.experts.layer import DispatchedExperts
from penstock_enginecore.experts.placement import Placement, check_slots
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
        """Sizes."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Its type's name in safetensors."""
        return self._tensor.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The rows, or a part of them."""
        return torch.cat([self._tensor[row : row + 1] for row in self._rows])[index]


class ExpertShare:
    """What rank ``rank`` has of the experts of a model of ``model_class`` and ``config``. ``place``: of numbers of layers and
    experts, where they are. Raises ModelLoadError for a model whose experts cannot be shared, ConfigError for too few slots.
    """

    def __init__(
        self,
        model_class: type[PreTrainedModel],
        config: PretrainedConfig,
        rank: int,
        place: Callable[[int, int], Placement],
    ) -> None:
        make: Any = model_class
        with torch.device("meta"):
            skeleton = make._from_config(config)
        found = expert_modules(skeleton)
        self._names = list(found)
        self._class = type(next(iter(found.values())))
        self._rank = rank
        self.num_experts = num_experts_of(next(iter(found.values())))
        self.placement = place(len(found), self.num_experts)
        check_slots(self.num_experts, self.placement.size, self.placement.slots)
        self._index = {_layer_of(name): index for index, name in enumerate(self._names)}

    def tensors(self, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
        """Those of the files that are this rank's, experts by the numbers of their slots."""
        return dict(self._own(stored))

    @contextmanager
    def made_small(self) -> Iterator[None]:
        """Experts that are made within the ``with`` block have room for this rank's slots alone."""
        experts: Any = self._class
        whole, slots = experts.__init__, self.placement.slots

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
        for index, name in enumerate(self._names):
            held = self.placement.held(self._rank, index)
            layers.append(DispatchedExperts(index, self.num_experts, module.get_submodule(name), held))
            module.set_submodule(name, layers[-1])
        return layers

    def _own(self, stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Any]]:
        for name, tensor in stored.items():
            layer = self._index.get(_layer_of(name))
            if layer is None:
                yield name, tensor
                continue
            held = self.placement.held(self._rank, layer)
            if single := _ONE_EXPERT.fullmatch(name):
                before, expert, behind = single.groups()
                for slot, each in enumerate(held):
                    if each == int(expert):
                        yield f"{before}{slot}{behind}", tensor
            elif self._is_of_experts(name, tensor.get_shape()):
                yield name, _Rows(tensor, held)
            else:
                yield name, tensor

    def _is_of_experts(self, name: str, shape: Sequence[int]) -> bool:
        return bool(shape) and shape[0] == self.num_experts and (len(shape) == 3 or ".experts." in name)


def _layer_of(name: str) -> str:
    found = _LAYER.search(name)
    return found.group(1) if found else name
