"""Partial loading of a checkpoint. All weights except experts are read before the number of the rank is known. Single
experts are read later, when the rank needs them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.experts.layer import DispatchedExperts
from penstock_enginecore.experts.placement import check_slots, fewest_slots
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import first_line, weights_progress
from penstock_enginecore.models.quantization.weights import StoredTensor, open_tensors

# Modules of experts that can be distributed over ranks. transformers' own plan for expert parallelism names these
# modules.

_DISPATCHED = "ep_dispatch_experts"
_SHARED_OUT = "grouped_gemm"
"""Value in transformers' plan that marks weights of experts modules. These weights have one row per expert, and a rank
has some of the rows.
"""


def expert_modules(module: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return the modules of experts by name, in order.

    Raises ModelLoadError, with the model's name, if transformers has no plan for the model, if layers have different
    numbers of experts, or if the experts are not supported.
    """
    model_name = type(module).__name__
    plan: Mapping[str, str] = getattr(module, "_ep_plan", None) or {}
    patterns = [
        re.compile(re.escape(name).replace(r"\*", r"\d+")) for name, word in plan.items() if word == _DISPATCHED
    ]
    if not patterns:
        raise ModelLoadError(
            f"expert_parallel: transformers has no expert parallel plan for {model_name}; disable expert_parallel"
        )
    found = {
        name: child for name, child in module.named_modules() if any(pattern.fullmatch(name) for pattern in patterns)
    }
    if not found:
        raise ModelLoadError(
            f"expert_parallel: transformers' expert plan for {model_name} matches no module in the model; disable "
            "expert_parallel"
        )
    shared_out = {name.rpartition(".")[2] for name, word in plan.items() if word == _SHARED_OUT}
    for name, child in found.items():
        _check(model_name, name, child, shared_out)
    counts = sorted({num_experts_of(child) for child in found.values()})
    if len(counts) > 1:
        raise ModelLoadError(
            f"expert_parallel: layers of {model_name} have different numbers of experts: {', '.join(map(str, counts))}"
        )
    return found


def num_experts_of(experts: torch.nn.Module) -> int:
    """Return the number of experts whose weights are in the module ``experts``."""
    return len(next(experts.parameters(recurse=False)))


def _check(model_name: str, name: str, experts: Any, shared_out: set[str]) -> None:
    own = dict(experts.named_parameters())
    if unknown := sorted(own.keys() - shared_out):
        raise ModelLoadError(
            f"expert_parallel: {name} of {model_name} has the weight {unknown[0]}, which transformers' expert "
            "parallel plan does not name"
        )
    if len({len(weight) for weight in own.values()}) != 1 or not hasattr(experts, "num_experts"):
        raise ModelLoadError(
            f"expert_parallel: the weights of {name} in {model_name} do not have the number of experts as the "
            "size of the first dimension"
        )


_ONE_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class _Rows:
    """Tensor in a file that has one row for each expert. A row is read from the file only when it is accessed."""

    def __init__(self, tensor: StoredTensor, rows: Sequence[int]) -> None:
        self._tensor = tensor
        self._rows = rows
        self.shape = (len(rows), *tensor.get_shape()[1:])

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the rows, or the part of the rows that ``index`` selects."""
        return torch.cat([self._tensor[row : row + 1] for row in self._rows])[index]


class ExpertShare:
    """Part of a model that a rank reads before it joins a group: all weights except experts, and the first expert of
    each layer.

    The first expert is read into every slot, so that the computation of experts can be checked. The function ``slots``
    returns the number of slots per rank for a given number of experts. Raises ModelLoadError if the experts cannot be
    distributed, and the errors of ``slots``.
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
        """Names of the modules of experts, in order."""
        self._class = type(next(iter(found.values())))
        self.num_experts = num_experts_of(next(iter(found.values())))
        self.slots = slots(self.num_experts)
        self._index = {_layer_of(name): index for index, name in enumerate(self.names)}

    def tensors(self, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
        """Return the tensors in the files for a model that was created in ``made_small``. In the names of the result,
        the number of an expert is the number of its slot.
        """
        held = (0,) * self.slots
        found: dict[str, Any] = {}
        for name, tensor in stored.items():
            found.update({name: tensor} if self._layer(name, tensor) is None else _in_slots(name, tensor, held))
        return found

    def experts_of(self, layer: int, experts: Sequence[int], stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
        """Return the tensors in the files for the given ``experts`` of a layer. In the result, experts are numbered
        from 0.
        """
        found: dict[str, Any] = {}
        for name, tensor in stored.items():
            if self._layer(name, tensor) == layer:
                found.update(_in_slots(name, tensor, experts))
        return found

    @contextmanager
    def made_small(self) -> Iterator[None]:
        """Return a context in which new modules of experts are created with only this rank's number of slots."""
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
        """Replace the experts modules of a model that was created in ``made_small`` by layers that dispatch tokens."""
        layers = []
        for index, name in enumerate(self.names):
            held = (0,) * self.slots
            layers.append(DispatchedExperts(index, self.num_experts, module.get_submodule(name), held))
            module.set_submodule(name, layers[-1])
        return layers

    def _layer(self, name: str, tensor: StoredTensor) -> int | None:
        """Return the number of the layer to whose experts a tensor belongs, or None if the tensor does not belong to
        experts.
        """
        layer = self._index.get(_layer_of(name))
        if layer is None or _ONE_EXPERT.fullmatch(name):
            return layer
        shape = tensor.get_shape()
        stacked = bool(shape) and shape[0] == self.num_experts and (len(shape) == 3 or ".experts." in name)
        return layer if stacked else None


def _in_slots(name: str, tensor: StoredTensor, held: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """Select the weights of the experts ``held`` from a tensor of the checkpoint. Yield names and tensors for a model
    that has only these experts.

    The number ``held[i]`` is the expert in slot i. If the tensor has one row for each expert, the yielded tensor has
    the same name and only the rows of the held experts. If the tensor belongs to one expert, the tensor is yielded for
    each slot of this expert. The name then has the number of the slot instead of the number of the expert.
    """
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


# Single experts of a checkpoint, which are read when a rank needs them.


class ExpertReader:
    """Reads single experts from the files in ``directory`` in ``dtype``.

    As in a full load, transformers merges and transposes the tensors. The tensors are loaded into a model on the meta
    device, in which only the experts of one layer have memory.
    """

    def __init__(self, share: ExpertShare, directory: Path, dtype: torch.dtype) -> None:
        self._share, self._directory = share, directory
        make: Any = share.model_class
        with torch.device("meta"):
            self._skeleton: Any = make._from_config(share.config, dtype=dtype)
        mapping: Any = get_model_conversion_mapping(self._skeleton)
        plan = self._skeleton._get_dtype_plan(dtype)
        self._config = LoadStateDictConfig(dtype=dtype, dtype_plan=plan, weight_mapping=mapping)

    def read(self, layer: int, experts: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the weights of these experts of a layer, ``[len(experts), ...]``, by name in the experts module.

        Raises ModelLoadError if the files do not contain these weights or can no longer be read.
        """
        module = self._skeleton.get_submodule(self._share.names[layer])
        whole = dict(module.named_parameters(recurse=False))
        try:
            for name, weight in whole.items():
                room = weight.new_empty(len(experts), *weight.shape[1:])
                setattr(module, name, torch.nn.Parameter(room, requires_grad=False))
            with open_tensors(self._directory) as stored, weights_progress(_untold, size=""):
                tensors = self._share.experts_of(layer, experts, stored)
                convert_and_load_state_dict_in_model(self._skeleton, tensors, self._config)
            read = {name: weight.detach() for name, weight in module.named_parameters(recurse=False)}
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, ModelLoadError) as e:
            raise ModelLoadError(f"cannot read {self._say(layer, experts)}: {first_line(e)}") from e
        finally:
            for name, weight in whole.items():
                setattr(module, name, weight)
        if missing := sorted(name for name, weight in read.items() if weight.is_meta):
            raise ModelLoadError(f"{self._say(layer, experts)} are incomplete: {missing[0]} is missing")
        return read

    def _say(self, layer: int, experts: Sequence[int]) -> str:
        numbers = ", ".join(map(str, experts))
        return f"model.path {str(self._directory)!r}: experts {numbers} of {self._share.names[layer]}"


def _untold(_: str) -> None:
    """Ignore progress messages. Reading a few experts is fast, and transformers would log a progress bar for each read."""


# Choice of the number of slots per rank when a model is loaded.


class SharedModel:
    """Creates the ``ExpertShare`` of a rank when a model is loaded, and keeps it."""

    def __init__(self, config: EngineCoreConfig) -> None:
        self._config = config
        self._share: ExpertShare | None = None

    @property
    def share(self) -> ExpertShare:
        """``ExpertShare`` of the loaded model. Raises RuntimeError if no model was loaded."""
        if self._share is None:
            raise RuntimeError("the experts were shared before a model was loaded")
        return self._share

    def __call__(self, model_class: type[PreTrainedModel], config: PretrainedConfig) -> ExpertShare:
        """Create the ``ExpertShare``. Raises ModelLoadError if the experts cannot be distributed, and ConfigError if
        configured sizes do not fit the model.
        """
        self._share = ExpertShare(model_class, config, self._slots)
        return self._share

    def _slots(self, num_experts: int) -> int:
        """Return the number of slots per rank: the configured number, or the number that a group of the minimum size
        needs for all experts.
        """
        sizes, slots = self._config.data_parallel, self._config.expert_parallel.slots
        if sizes.size > num_experts:
            raise ConfigError(
                f"data_parallel.size is {sizes.size}; it must be at most {num_experts}, the model's number of experts"
            )
        slots = slots or fewest_slots(num_experts, sizes.min_size)
        check_slots(num_experts, sizes.min_size, slots)
        return slots


def check_shared(config: EngineCoreConfig, device: torch.device, task: str) -> None:
    """Raise ConfigError if expert parallelism does not support the device, task or executor of this engine."""
    if device.type != "cpu":
        raise ConfigError(
            f"expert_parallel.enabled is true and model.device is {device.type!r}, but expert parallelism is only "
            "supported on CPUs"
        )
    if task != "generate":
        raise ConfigError(
            f"expert_parallel.enabled is true, but the model's task is {task}; expert parallelism supports only the task generate"
        )
    if config.executor.resolved_kind != "uniproc":
        raise ConfigError(
            f"expert_parallel.enabled is true and executor.kind is {config.executor.kind!r}; it must be 'uniproc'"
        )
