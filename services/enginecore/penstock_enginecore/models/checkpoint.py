"""Files of a checkpoint: their location, and whether their tensors match the model."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from penstock_common.checkpoint import WEIGHT_FILES
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.quantization.weights import open_tensors

# Check before loading: the tensors in the files must have the shapes that config.json requires.


def weight_files(config: ModelConfig) -> Path:
    """Return the directory of the weights. If the path is a hub ID, download the weights first."""
    directory = Path(config.path).expanduser()
    if directory.is_dir():
        return directory
    patterns = ["*.json", WEIGHT_FILES[0]]
    return Path(
        huggingface_hub.snapshot_download(config.path, revision=config.revision or None, allow_patterns=patterns)
    )


def check_shapes(directory: Path, make: Callable[[], PreTrainedModel], where: str) -> None:
    """Raise ModelLoadError for a tensor in the files whose shape differs from the model's parameter of the same name.

    ``make`` creates the model on the meta device. Tensors that transformers renames or converts are checked after
    loading instead.
    """
    if not any(directory.glob("*.safetensors")):
        return
    with torch.device("meta"):
        model = make()
    converted = _converted(get_model_conversion_mapping(model))
    parameters = {name: list(value.shape) for name, value in model.state_dict().items() if not converted(name)}
    with open_tensors(directory) as stored:
        for name, wanted in parameters.items():
            if name in stored and (found := list(stored[name].get_shape())) != wanted:
                raise ModelLoadError(mismatch(where, name, found, wanted))


def mismatch(where: str, name: str, found: Iterable[int], wanted: Iterable[int]) -> str:
    """Return the error text for a tensor whose shape differs from the shape of the model's parameter."""
    return (
        f"{where}: tensor {name} has shape {list(found)} in the files, but config.json requires "
        f"{list(wanted)}; files and config.json do not belong together: take both from the same version of the checkpoint"
    )


def _converted(transforms: Iterable[Any]) -> Callable[[str], bool]:
    """Return a function that, given a parameter's name, tells whether transformers may create this parameter from
    tensors of other shapes.
    """
    ends = {
        pattern.rstrip("$").rsplit(".", 1)[-1].rstrip("\\")
        for transform in transforms
        if isinstance(transform, WeightConverter)
        for pattern in transform.target_patterns
    }
    return lambda name: any(end in name for end in ends)


# Check after loading: the checkpoint and the model have the same weights.
#
# Every load of a model ends with this check. A weight that the model does not use would change the output unnoticed.
# Examples are layers beyond the number of layers in the configuration, and scales of quantized weights whose
# quantization the configuration does not describe.

_SHOWN = 3
"""Number of tensor names shown in an error."""
_BUFFERS = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|cos_cached|sin_cached|position_ids|token_type_ids|masked_bias|num_batches_tracked"
    r"|_extra_state|(attn|attention|self_attn|crossattention)\.bias)$"
)
"""Names of tables and masks that older versions of transformers saved with the weights. Models compute these tensors
themselves.
"""
_NEXT_TOKENS = re.compile(r"(^|\.)mtp\w*\.")
"""Names of modules for multi-token prediction, in checkpoints whose names for these modules begin with ``mtp``."""
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
_NEXT_TOKENS_ONLY = ".eh_proj."
"""Name of a projection that only layers for multi-token prediction have."""
_HEADS = re.compile(
    r"^(lm_head|embed_out|score|classifier|pre_classifier|sop_classifier|classification_head|multiple_choice_head|qa_outputs"
    r"|cls|predictions|lm_predictions|mask_predictions|generator_predictions|generator_lm_head|discriminator_predictions"
    r"|vocab_transform|vocab_layer_norm|vocab_projector|head|decoder)\.|(^|\.)pooler\."
)
"""Names of heads for other tasks in transformers. Pooling models do not use these heads."""
_QUANTIZED = re.compile(
    r"(scale|scales|scale_inv|_scale_\w+|qweight|qzeros|g_idx|_packed|_shape|_zero_point|_blocks|absmax|quant_map|quant_state\S*)$"
)


def check_weights(
    info: Mapping[str, Any], model: PreTrainedModel, config: ModelConfig, *, optional: tuple[str, ...], pools: bool
) -> None:
    """Raise ModelLoadError for weights that are missing, have another shape than the model's parameter, or are unused.

    Args:
        info: Loading report of transformers: ``missing_keys``, ``mismatched_keys`` and ``unexpected_keys``. The latter excludes
            names that the model's class declares as unused.
        model: The loaded model.
        config: Settings with the path of the checkpoint, and with the prefixes of tensors that may be unused.
        optional: Prefixes of the names of weights that may be missing.
        pools: Whether the model is served for pooling: without its head, or with a head that is not in the checkpoint.
    """
    where = f"model.path {config.path!r}"
    if missing := [key for key in _names(info["missing_keys"]) if not key.startswith(optional)]:
        raise ModelLoadError(
            f"{where}: {len(missing)} weights are missing, for example {missing[0]}; the files do not belong to this "
            "configuration"
        )
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise ModelLoadError(mismatch(where, name, found, wanted))
    left = left_over(_names(info["unexpected_keys"]), model.config, pools=pools)
    if left := [key for key in left if not key.startswith(config.unused_weights)]:
        number = "1 tensor" if len(left) == 1 else f"{len(left)} tensors"
        more = ", ..." if len(left) > _SHOWN else ""
        raise ModelLoadError(
            f"{where}: the files have {number} that {type(model).__name__} does not use: {', '.join(left[:_SHOWN])}{more}; "
            f"{_remedy(left, model.config)}. If the model does not need these tensors, add their names to model.unused_weights"
        )


def left_over(keys: Iterable[str], config: PretrainedConfig, *, pools: bool) -> list[str]:
    """Return the names of unused tensors, except tensors that models are known to ignore.

    Models ignore old buffers, layers for multi-token prediction and, if ``pools``, heads.
    """
    keys = [key for key in keys if not (_BUFFERS.search(key) or _NEXT_TOKENS.search(key))]
    guessing = _guessing_layers(keys, config.get_text_config())
    return [key for key in keys if _layer_of(key) not in guessing and not (pools and _HEADS.search(key))]


def _guessing_layers(keys: Collection[str], config: PretrainedConfig) -> frozenset[int | None]:
    """Return the indices of the layers for multi-token prediction, which follow the model's last layer. The
    configuration has the number of these layers.
    """
    first = getattr(config, "num_hidden_layers", None)
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    if first is None:
        return frozenset()
    found = {_layer_of(key) for key in keys if _NEXT_TOKENS_ONLY in key}
    return frozenset(found.intersection(range(first, first + count)))


def _layer_of(key: str) -> int | None:
    found = _LAYER.search(key)
    return None if found is None else int(found.group(1))


def _remedy(left: Collection[str], config: PretrainedConfig) -> str:
    """Return the end of an error text about unused tensors: the cause, as far as the names of the tensors ``left`` show
    it, and the fix.
    """
    if any(_QUANTIZED.search(key) for key in left):
        return (
            "they are parts of quantized weights, which config.json does not describe: take the quantization_config from the "
            "checkpoint's author"
        )
    count = getattr(config, "num_hidden_layers", None)
    layers = {layer for key in left if (layer := _layer_of(key)) is not None}
    if count is not None and config.get_text_config() is config and layers and min(layers) >= count:
        return (
            f"num_hidden_layers is {count} in config.json, but the tensors are of layers up to {max(layers)} (the first is "
            "0): take config.json from the checkpoint's author"
        )
    return "the files do not belong to this configuration: take both from the same version of the checkpoint"


def _names(keys: Iterable[Any]) -> list[str]:
    """Return the names of tensors in alphabetical order."""
    return sorted(map(str, keys))
