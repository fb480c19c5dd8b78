"""Single experts of a checkpoint, read when a rank comes to hold them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from penstock_enginecore.experts.loading import ExpertShare
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import first_line, weights_progress
from penstock_enginecore.models.quantization.weights import open_tensors


class ExpertReader:
    """Reads from the files in ``directory`` in ``dtype``. transformers merges and transposes what it reads, as when it loads the
    whole model: into a model without memory, of which one layer's experts become real.
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
        """The weights of these experts of a layer, by the names that they have in its module, ``[len(experts), ...]``. Raises
        ModelLoadError for files that do not have them, or that cannot be read any more.
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
            raise ModelLoadError(f"{self._say(layer, experts)} cannot be read: {first_line(e)}") from e
        finally:
            for name, weight in whole.items():
                setattr(module, name, weight)
        if missing := sorted(name for name, weight in read.items() if weight.is_meta):
            raise ModelLoadError(f"{self._say(layer, experts)} are not whole there: {missing[0]} is missing")
        return read

    def _say(self, layer: int, experts: Sequence[int]) -> str:
        numbers = ", ".join(map(str, experts))
        return f"model.path {str(self._directory)!r}: experts {numbers} of {self._share.names[layer]}"


def _untold(_: str) -> None:
    """Reading some experts takes moments; transformers would draw a bar in the log for each."""
