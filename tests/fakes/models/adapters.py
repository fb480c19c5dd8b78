"""Adapters of tiny models, created, saved and merged by PEFT."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
OF_TEXT = {"qwen3_omni_moe": {"exclude_modules": ".*audio_tower.*"}}
"""Settings of adapters that change only the text model, by model type. For some mixtures, PEFT uses only the last part of
the names that an expression for target_modules matches.
"""


def save_adapter(model: PreTrainedModel, folder: Path, *, seed: int = 0, **settings: Any) -> Any:
    """Write an adapter of random numbers for ``model`` to ``folder``, and return PEFT's model with it. ``settings``: of
    LoraConfig, with all linear layers for modules where they name none.
    """
    torch.manual_seed(seed)
    wanted = {"target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM", **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about deprecated features and about saving
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**wanted))
        adapted.save_pretrained(folder)
    return adapted.eval()


def load_adapter(model: PreTrainedModel, folder: Path) -> Any:
    """Return PEFT's model with the saved adapter in ``folder``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def merged(adapted: Any) -> PreTrainedModel:
    """Merge the adapter into the weights and return the model. ``adapted`` cannot be used after that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PreTrainedModel = adapted.merge_and_unload()
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    """Change settings in an adapter's config."""
    settings = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(settings | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of an adapter in place."""
    tensors = load_file(folder / TENSORS)
    edit(tensors)
    save_file(tensors, folder / TENSORS)
