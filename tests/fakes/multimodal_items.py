"""Media items for tiny checkpoints: tensors from transformers' processors, and features from transformers' models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoVideoProcessor, PreTrainedModel

from penstock_common.types.media import Modality
from penstock_enginecore.models.multimodal.base import EncoderItem, to_data
from tests.fakes.multimodal_models import make_image, make_sound

Tensors = dict[str, torch.Tensor]
_RAW = {"do_rescale": False, "do_normalize": False}
_ARGUMENTS: dict[str, dict[str, Any]] = {"mistral3": {"patch_size": 16}}
"""Of image processors, which the processors of these families give them."""
VIDEO_FAMILIES = (
    "llava_onevision",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "internvl",
    *("glm4v", "glm_ocr"),
    "gemma4",
    "gemma4_unified",
)
GEMMA4 = ("gemma4", "gemma4_unified")
"""Families whose image processors pad the patches of an image."""
WITHOUT_PILLOW = ("gemma4_unified", "llama4")
"""Families of which transformers has no Pillow backend."""


def image_tensors(
    family: str, directory: Path, size: tuple[int, int] = (50, 40), *, raw: bool = True, seed: int = 0
) -> Tensors:
    """Return the tensors of an image of ``size`` (width, height). ``raw``: pixels before rescaling and normalization."""
    make: Any = AutoImageProcessor
    processor = make.from_pretrained(directory, backend="torchvision" if family in WITHOUT_PILLOW else "pil")
    arguments = {**_ARGUMENTS.get(family, {}), **(_RAW if raw else {})}
    tensors = dict(processor(images=[make_image(*size, seed)], return_tensors="pt", **arguments))
    if raw:  # processors that cut out patches return them in float32
        tensors["pixel_values"] = tensors["pixel_values"].to(torch.uint8)
    elif family == "llama4":  # its processor returns bfloat16
        tensors["pixel_values"] = tensors["pixel_values"].float()
    if family in GEMMA4:
        return _without_padding(tensors)
    return tensors


def _without_padding(tensors: Tensors) -> Tensors:
    """Return the tensors of Gemma 4's pictures without their padding, and without the number of embeddings."""
    positions = next(name for name in tensors if name.endswith("position_ids"))
    count = int((tensors[positions][0] != -1).all(-1).sum())
    return {name: each[:, :count] for name, each in tensors.items() if each.dim() == 3}


def video_tensors(directory: Path, frames: int = 4, *, raw: bool = True) -> Tensors:
    """Return the tensors of a video of 48 x 40 pixels."""
    make: Any = AutoVideoProcessor
    processor = make.from_pretrained(directory)
    video = np.stack([np.asarray(make_image(48, 40, seed)) for seed in range(frames)])
    arguments = {"do_sample_frames": False, **(_RAW if raw else {})}
    tensors = dict(processor(videos=[video], return_tensors="pt", **arguments))
    if "video_position_ids" in tensors:
        return {**_without_padding(tensors), "num_frames_per_video": torch.tensor([frames])}
    return tensors


def audio_tensors(family: str, directory: Path, seconds: float = 1.3) -> Tensors:
    """Return the tensors of a sound from the processor of this model type."""
    make: Any = AutoFeatureExtractor
    extractor = make.from_pretrained(directory)
    sound = make_sound(seconds)
    if family == "voxtral":
        found = extractor(
            sound, sampling_rate=16_000, padding=True, truncation=False, pad_to_multiple_of=480_000, return_tensors="pt"
        )
        windows = found["input_features"].reshape(extractor.feature_size, -1, 3000).transpose(0, 1)
        return {"input_features": windows.contiguous()}
    if family in GEMMA4:
        return dict(extractor([sound], sampling_rate=16_000, return_tensors="pt"))
    padding: Any = True if family in ("qwen3_omni_moe", "qwen3_asr") else "max_length"
    found = extractor(
        sound,
        sampling_rate=16_000,
        return_attention_mask=True,
        padding=padding,
        truncation=False,
        return_tensors="pt",
    )
    mask = "input_features_mask" if family == "qwen3_asr" else "feature_attention_mask"
    return {"input_features": found["input_features"], mask: found["attention_mask"]}


@torch.no_grad()
def features(model: PreTrainedModel, modality: Modality, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the rows of ``get_*_features`` for normalized tensors. Each row is followed by the rows for deepstack
    layers.
    """
    config: Any = model.config
    base: Any = model if config.model_type == "llama4" else model.model
    if config.model_type == "qwen2_audio":
        return _heard(model, tensors)
    arguments = {
        name: each
        for name, each in tensors.items()
        if name not in ("num_patches", "num_crops", "rows", "cols", "aspect_ratios")
    }
    if "pixel_values_videos" in tensors and config.model_type == "internvl":
        arguments = {"pixel_values": tensors["pixel_values_videos"].flatten(0, 1)}
    arguments.pop("second_per_grid_ts", None)
    if modality != "audio":
        for name in ("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio"):
            of_video = modality == "video" and name == "vision_aspect_ratio"
            if hasattr(config, name) and not of_video:
                arguments[name] = getattr(config, name)
    if config.model_type == "internvl":
        found = base.get_image_features(**arguments)
    else:
        found = getattr(base, f"get_{modality}_features")(**arguments)
    if config.model_type == "llama4":
        found.pooler_output = base.multi_modal_projector(found.last_hidden_state.flatten(0, 1))
    rows = found.pooler_output
    if config.model_type == "qwen3_omni_moe_thinker" and modality == "audio":  # no embeddings for the first layers
        rows = torch.nn.functional.pad(rows, (0, 2 * rows.shape[-1]))
    if "input_features_mask" in tensors and config.model_type in GEMMA4:
        rows = rows[found.attention_mask]
    if isinstance(rows, torch.Tensor):
        return rows.reshape(-1, rows.shape[-1])
    deep = [layer[0] for layer in getattr(found, "deepstack_features", None) or ()]
    return torch.cat([rows[0], *deep], dim=-1)


def _heard(model: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the embeddings of a sound for Qwen2-Audio's text model, for which transformers has no function."""
    length = int(tensors["feature_attention_mask"].sum())
    rows = (((length - 1) // 2 + 1) - 2) // 2 + 1
    seen: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _args: object, inputs: dict[str, Any]) -> None:
        seen.append(inputs["inputs_embeds"][0, 1:-1])

    handle = model.model.language_model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        model(input_ids=torch.tensor([[5, *[model.config.audio_token_id] * rows, 6]]), **tensors)
    finally:
        handle.remove()
    return seen[0]


def item(
    tensors: Mapping[str, torch.Tensor], num_embeds: int, modality: Modality = "image", identifier: str = "one"
) -> EncoderItem:
    """Return an item for the encoder."""
    return EncoderItem(identifier, modality, num_embeds, {name: to_data(each) for name, each in tensors.items()})
