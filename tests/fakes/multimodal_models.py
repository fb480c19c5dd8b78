"""Tiny checkpoints with vision or audio encoders, of every supported family. They have random weights, a real tokenizer
with the family's tokens, and processor files like checkpoints on the hub.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.masking_utils import create_masks_for_generate
from transformers.models.gemma4_unified import modeling_gemma4_unified

from tests.fakes import multimodal_towers
from tests.fakes.models.small_tokenizers import byte_level

SIDE = 32
"""Width and height in pixels of an image or a tile for the vision encoders."""
PATCH = 8
VOCAB_SIZE = 512
WINDOW = 24
"""Window of gemma3's sliding layer, in tokens."""
_START, _END, _PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_HALF = [0.5, 0.5, 0.5]

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_HEAD = {"head_dim": 16}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_SQUARE = {**_TOWER, "image_size": SIDE, "patch_size": PATCH}
_CLIP = {"model_type": "clip_vision_model", **_SQUARE, "num_hidden_layers": 3, "projection_dim": 32}
"""Config of CLIP's vision encoder. Models use the hidden states after the layer before the last."""
_SIGLIP = {"model_type": "siglip_vision_model", **_SQUARE, "vision_use_head": False}
_PIXTRAL = {"model_type": "pixtral", **_TOWER, "image_size": 8 * PATCH, "patch_size": PATCH, "head_dim": 16}
_SECTIONS = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
_QWEN3_5_TEXT = {
    **_TEXT,
    **_HEAD,
    "num_hidden_layers": 3,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {**_SECTIONS, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
}
_QWEN_TOWER = {
    "depth": 2,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

_PIXELS = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "resample": 3,
}
_AS_CLIP = {**_PIXELS, "image_mean": _CLIP_MEAN, "image_std": _CLIP_STD}
_AS_SIGLIP = {**_PIXELS, "image_mean": _HALF, "image_std": _HALF}
_CROPPED = {"do_center_crop": True, "crop_size": {"height": SIDE, "width": SIDE}, "size": {"shortest_edge": SIDE}}
_SQUARED = {"size": {"height": SIDE, "width": SIDE}}
_PIXTRAL_PIXELS = {
    **_AS_CLIP,
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": {"height": PATCH, "width": PATCH},
    "size": {"longest_edge": 8 * PATCH},
}
_PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE], [3 * SIDE, SIDE], [SIDE, 3 * SIDE]]
_TILES = [[SIDE * rows, SIDE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
_QWEN_PIXELS = {
    **_AS_CLIP,
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 4 * PATCH * PATCH,
    "max_pixels": 64 * PATCH * PATCH,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_QWEN_VIDEO = {
    **{key: value for key, value in _QWEN_PIXELS.items() if not key.startswith("image_processor")},
    "video_processor_type": "Qwen2VLVideoProcessor",
    "min_frames": 2,
    "max_frames": 8,
}
_GOT_OCR = {
    **_AS_CLIP,
    **_SQUARED,
    "image_processor_type": "GotOcr2ImageProcessor",
    "crop_to_patches": True,
    "min_patches": 1,
    "max_patches": 4,
}
_IDEFICS = {
    **_AS_SIGLIP,
    "do_image_splitting": True,
    "do_pad": True,
    "max_image_size": {"longest_edge": SIDE},
    "size": {"longest_edge": 3 * SIDE},
}
_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@dataclass(frozen=True)
class _Maker:
    """Description of a model type.

    ``config``: config of the model; a string in a key with ``token`` becomes the id of that token. ``files``: files of
    the processors. ``named``: tokens by tokenizer attribute. ``marks``: texts that a chat template writes for a media
    part. ``section``: section of the config that has the configs of all parts, or empty.
    """

    config: Mapping[str, Any]
    text: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    tokens: tuple[str, ...]
    marks: Mapping[str, str]
    tower: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    section: str = ""


def _pixels(processor: str, pixels: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {
        "preprocessor_config.json": {**pixels, "processor_class": processor},
        "processor_config.json": {**settings, "processor_class": processor},
    }


_LLAVA = {"model_type": "llava", "image_token_index": "<image>", "image_seq_length": 16}
_LLAMA = {"model_type": "llama", **_TEXT, **_HEAD}
_QWEN2 = {"model_type": "qwen2", **_TEXT}
_MISTRAL = {"model_type": "mistral", **_TEXT, **_HEAD, "sliding_window": None}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_MARKS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_PIXTRAL_SETTINGS = {
    "patch_size": PATCH,
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
_AUDIO = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 16,
    "hop_length": 160,
    "n_fft": 400,
    "padding_side": "right",
    "padding_value": 0.0,
    "sampling_rate": 16_000,
    "return_attention_mask": True,
}


def _qwen_files(processor: str, pixels: Mapping[str, Any], video: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {
        "preprocessor_config.json": {**pixels, "processor_class": processor},
        "video_preprocessor_config.json": {**video, "processor_class": processor},
    }


_QWEN3_TOWER = {
    **_QWEN_TOWER,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}
_QWEN3_FILES = _qwen_files(
    "Qwen3VLProcessor",
    {
        **{key: value for key, value in _QWEN_PIXELS.items() if not key.endswith("_pixels")},
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 4 * PATCH * PATCH, "longest_edge": 64 * PATCH * PATCH},
        "image_mean": _HALF,
        "image_std": _HALF,
    },
    {
        **{key: value for key, value in _QWEN_VIDEO.items() if not key.endswith("_pixels")},
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 8 * PATCH * PATCH, "longest_edge": 256 * PATCH * PATCH},
        "image_mean": _HALF,
        "image_std": _HALF,
    },
)

_GEMMA4_TEXT = {
    **_TEXT,
    **_HEAD,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": 30.0,
}
_GEMMA4_NAMED = {
    "boi_token": "<|image>",
    "image_token": "<|image|>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "audio_token": "<|audio|>",
    "eoa_token": "<audio|>",
}
_GEMMA4_MARKS = {"image": "\n\n<|image|>\n\n", "video": "\n\n<|video|>\n\n", "audio": "<|audio|>"}
_GEMMA4_IDS = {
    "boi_token_id": "<|image>",
    "image_token_id": "<|image|>",
    "eoi_token_id": "<image|>",
    "boa_token_id": "<|audio>",
    "audio_token_id": "<|audio|>",
    "eoa_token_index": "<audio|>",
    "video_token_id": "<|video|>",
}
_GEMMA4_PIXELS = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}


def _gemma4_files(name: str, extractor: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the files of a checkpoint with processors of these classes. ``extractor`` is the feature extractor."""
    pixels = {**_PIXELS, **_GEMMA4_PIXELS, "do_normalize": False}
    return {
        "processor_config.json": {
            "processor_class": f"{name}Processor",
            "image_seq_length": 70,
            "audio_seq_length": 50,
            "image_processor": {**pixels, "image_processor_type": f"{name}ImageProcessor"},
            "video_processor": {**pixels, "video_processor_type": f"{name}VideoProcessor", "num_frames": 4},
            "feature_extractor": {**extractor, "feature_extractor_type": f"{name}AudioFeatureExtractor"},
        }
    }


_MAKERS: dict[str, _Maker] = {
    "llava": _Maker(
        config={**_LLAVA, "vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        text=_LLAMA,
        tower=_CLIP,
        files=_pixels(
            "LlavaProcessor",
            {**_AS_CLIP, **_CROPPED, "image_processor_type": "CLIPImageProcessor"},
            {
                "image_token": "<image>",
                "num_additional_image_tokens": 1,
                "patch_size": PATCH,
                "vision_feature_select_strategy": "default",
            },
        ),
        tokens=("<image>",),
        marks={"image": "<image>"},
    ),
    "llava_siglip": _Maker(
        config={**_LLAVA, "vision_feature_layer": [-2, -1], "vision_feature_select_strategy": "full"},
        text=_QWEN2,
        tower=_SIGLIP,
        files=_pixels(
            "LlavaProcessor",
            {**_AS_SIGLIP, **_SQUARED, "image_processor_type": "SiglipImageProcessor"},
            {
                "image_token": "<image>",
                "num_additional_image_tokens": 0,
                "patch_size": PATCH,
                "vision_feature_select_strategy": "full",
            },
        ),
        tokens=("<image>",),
        marks={"image": "<image>"},
    ),
    "llava_pixtral": _Maker(
        config={
            "model_type": "llava",
            "image_token_index": "[IMG]",
            "image_seq_length": 1,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        text=_MISTRAL,
        tower=_PIXTRAL,
        files=_pixels("PixtralProcessor", _PIXTRAL_PIXELS, _PIXTRAL_SETTINGS),
        tokens=_PIXTRAL_TOKENS,
        marks={"image": "[IMG]"},
    ),
    "llava_next": _Maker(
        config={
            "model_type": "llava_next",
            "image_token_index": "<image>",
            "image_grid_pinpoints": _PINPOINTS,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "image_seq_length": 16,
        },
        text=_MISTRAL,
        tower=_CLIP,
        files=_pixels(
            "LlavaNextProcessor",
            {
                **_AS_CLIP,
                **_CROPPED,
                "image_processor_type": "LlavaNextImageProcessor",
                "image_grid_pinpoints": _PINPOINTS,
                "do_pad": True,
            },
            {
                "image_token": "<image>",
                "num_additional_image_tokens": 1,
                "patch_size": PATCH,
                "vision_feature_select_strategy": "default",
            },
        ),
        tokens=("<image>",),
        marks={"image": "<image>"},
    ),
    "llava_onevision": _Maker(
        config={
            "model_type": "llava_onevision",
            "image_token_index": "<image>",
            "video_token_index": "<video>",
            "image_grid_pinpoints": _TILES,
            "vision_aspect_ratio": "anyres_max_4",
        },
        text=_QWEN2,
        tower=_SIGLIP,
        files={
            "preprocessor_config.json": {
                **_AS_SIGLIP,
                **_SQUARED,
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "image_grid_pinpoints": _TILES,
                "do_pad": True,
                "processor_class": "LlavaOnevisionProcessor",
            },
            "video_preprocessor_config.json": {
                **_AS_SIGLIP,
                **_SQUARED,
                "video_processor_type": "LlavaOnevisionVideoProcessor",
                "processor_class": "LlavaOnevisionProcessor",
            },
            "processor_config.json": {
                "image_token": "<image>",
                "video_token": "<video>",
                "num_image_tokens": 16,
                "vision_feature_select_strategy": "full",
                "vision_aspect_ratio": "anyres_max_4",
                "processor_class": "LlavaOnevisionProcessor",
            },
        },
        tokens=("<image>", "<video>"),
        marks={"image": "<image>", "video": "<video>"},
    ),
    "qwen2_vl": _Maker(
        config={"model_type": "qwen2_vl", **_QWEN_IDS},
        text={"model_type": "qwen2_vl_text", **_TEXT, "rope_parameters": _SECTIONS},
        tower={"model_type": "qwen2_vl_vision", **_QWEN_TOWER, "embed_dim": 32, "hidden_size": 64},
        files=_qwen_files("Qwen2VLProcessor", _QWEN_PIXELS, _QWEN_VIDEO),
        tokens=_QWEN_TOKENS,
        marks=_QWEN_MARKS,
    ),
    "qwen2_5_vl": _Maker(
        config={"model_type": "qwen2_5_vl", **_QWEN_IDS},
        text={"model_type": "qwen2_5_vl_text", **_TEXT, "rope_parameters": _SECTIONS},
        tower={
            "model_type": "qwen2_5_vl_vision",
            **_QWEN_TOWER,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "window_size": 4 * PATCH,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        files=_qwen_files("Qwen2_5_VLProcessor", _QWEN_PIXELS, _QWEN_VIDEO),
        tokens=_QWEN_TOKENS,
        marks=_QWEN_MARKS,
    ),
    "qwen3_vl": _Maker(
        config={"model_type": "qwen3_vl", **_QWEN_IDS},
        text={
            "model_type": "qwen3_vl_text",
            **_TEXT,
            **_HEAD,
            "rope_parameters": {**_SECTIONS, "mrope_interleaved": True},
        },
        tower={"model_type": "qwen3_vl_vision", **_QWEN3_TOWER, **_DEEPSTACK},
        files=_QWEN3_FILES,
        tokens=_QWEN_TOKENS,
        marks=_QWEN_MARKS,
    ),
    "qwen3_vl_moe": _Maker(
        config={"model_type": "qwen3_vl_moe", **_QWEN_IDS},
        text={
            "model_type": "qwen3_vl_moe_text",
            **_TEXT,
            **_HEAD,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "rope_parameters": {**_SECTIONS, "mrope_interleaved": True},
        },
        tower={"model_type": "qwen3_vl_moe_vision", **_QWEN3_TOWER, **_DEEPSTACK},
        files=_QWEN3_FILES,
        tokens=_QWEN_TOKENS,
        marks=_QWEN_MARKS,
    ),
    "qwen3_5": _Maker(
        config={"model_type": "qwen3_5", **_QWEN_IDS},
        text={"model_type": "qwen3_5_text", **_QWEN3_5_TEXT},
        tower={"model_type": "qwen3_5_vision", **_QWEN3_TOWER},
        files=_QWEN3_FILES,
        tokens=_QWEN_TOKENS,
        marks=_QWEN_MARKS,
    ),
    "qwen3_5_moe": _Maker(
        config={"model_type": "qwen3_5_moe", **_QWEN_IDS},
        text={
            "model_type": "qwen3_5_moe_text",
            **_QWEN3_5_TEXT,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
        tower={"model_type": "qwen3_5_moe_vision", **_QWEN3_TOWER},
        files=_QWEN3_FILES,
        tokens=_QWEN_TOKENS,
        marks=_QWEN_MARKS,
    ),
    "gemma3": _Maker(
        config={
            "model_type": "gemma3",
            "mm_tokens_per_image": 16,
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        text={
            "model_type": "gemma3_text",
            **_TEXT,
            **_HEAD,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        tower={**_SIGLIP, "patch_size": 4},
        files=_pixels(
            "Gemma3Processor",
            {**_AS_SIGLIP, **_SQUARED, "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 16},
            {"image_seq_length": 16},
        ),
        tokens=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        named={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        marks={"image": "<start_of_image>"},
    ),
    "gemma4": _Maker(
        config={
            "model_type": "gemma4",
            **_GEMMA4_IDS,
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [16, 8],
                "output_proj_dims": 48,
            },
        },
        text={"model_type": "gemma4_text", **_GEMMA4_TEXT},
        tower={
            **_TOWER,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "position_embedding_size": 256,
            "standardize": True,
        },
        files=_gemma4_files("Gemma4", {"feature_size": 16, "sampling_rate": 16_000}),
        tokens=(*_GEMMA4_NAMED.values(), "<|video|>"),
        named=_GEMMA4_NAMED,
        marks=_GEMMA4_MARKS,
    ),
    "gemma4_unified": _Maker(
        config={"model_type": "gemma4_unified", **_GEMMA4_IDS, "audio_config": {"audio_embed_dim": 640}},
        text={"model_type": "gemma4_unified_text", **_GEMMA4_TEXT},
        tower={
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "mm_embed_dim": 64,
            "output_proj_dims": 64,
            "mm_posemb_size": 80,
        },
        files=_gemma4_files("Gemma4Unified", {"feature_size": 640, "audio_samples_per_token": 640}),
        tokens=(*_GEMMA4_NAMED.values(), "<|video|>"),
        named=_GEMMA4_NAMED,
        marks=_GEMMA4_MARKS,
    ),
    "internvl": _Maker(
        config={"model_type": "internvl", "image_token_id": "<IMG_CONTEXT>", "image_seq_length": 4},
        text=_QWEN2,
        tower={"model_type": "internvl_vision", **_SQUARE},
        files=_pixels("InternVLProcessor", _GOT_OCR, {"image_seq_length": 4})
        | {
            "video_preprocessor_config.json": {
                **_AS_CLIP,
                **_SQUARED,
                "video_processor_type": "InternVLVideoProcessor",
                "processor_class": "InternVLProcessor",
            }
        },
        tokens=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        marks={"image": "<IMG_CONTEXT>\n", "video": "<video>\n"},
    ),
    "aya_vision": _Maker(
        config={"model_type": "aya_vision", "image_token_index": "<|IMG_PATCH|>", "downsample_factor": 2},
        text={
            "model_type": "cohere2",
            **_TEXT,
            **_HEAD,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        tower=_SIGLIP,
        files=_pixels(
            "AyaVisionProcessor",
            {**_GOT_OCR, "image_mean": _HALF, "image_std": _HALF},
            {
                "patch_size": PATCH,
                "img_size": SIDE,
                "downsample_factor": 2,
                "image_token": "<image>",
                "img_patch_token": "<|IMG_PATCH|>",
                "start_of_img_token": "<|START_OF_IMG|>",
                "end_of_img_token": "<|END_OF_IMG|>",
                "tile_token": "TILE",
                "tile_global_token": "TILE_GLOBAL",
            },
        ),
        tokens=(
            "<image>",
            "<|IMG_PATCH|>",
            "<|START_OF_IMG|>",
            "<|END_OF_IMG|>",
            "<|IMG_LINE_BREAK|>",
            "TILE_GLOBAL",
            *(f"TILE_{index}" for index in range(1, 13)),
        ),
        marks={"image": "<image>"},
    ),
    "mistral3": _Maker(
        config={
            "model_type": "mistral3",
            "image_token_index": "[IMG]",
            "vision_feature_layer": -1,
            "spatial_merge_size": 2,
        },
        text=_MISTRAL,
        tower=_PIXTRAL,
        files=_pixels("PixtralProcessor", _PIXTRAL_PIXELS, {**_PIXTRAL_SETTINGS, "spatial_merge_size": 2}),
        tokens=_PIXTRAL_TOKENS,
        marks={"image": "[IMG]"},
    ),
    "idefics3": _Maker(
        config={"model_type": "idefics3", "image_token_id": "<image>", "scale_factor": 2},
        text={**_LLAMA, "pad_token_id": 0},
        tower={"model_type": "idefics3_vision", **_SQUARE},
        files=_pixels(
            "Idefics3Processor", {**_IDEFICS, "image_processor_type": "Idefics3ImageProcessor"}, {"image_seq_len": 4}
        ),
        tokens=("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_ROWS),
        marks={"image": "<image>"},
    ),
    "smolvlm": _Maker(
        config={"model_type": "smolvlm", "image_token_id": "<image>", "scale_factor": 2},
        text={**_LLAMA, "pad_token_id": 0},
        tower={"model_type": "smolvlm_vision", **_SQUARE},
        files=_pixels(
            "SmolVLMProcessor", {**_IDEFICS, "image_processor_type": "SmolVLMImageProcessor"}, {"image_seq_len": 4}
        )
        | {
            "video_preprocessor_config.json": {
                **_IDEFICS,
                "video_processor_type": "SmolVLMVideoProcessor",
                "video_sampling": {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": SIDE}},
                "processor_class": "SmolVLMProcessor",
            }
        },
        tokens=("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "<video>", *_ROWS),
        named={
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "end_of_utterance_token": "<end_of_utterance>",
            "global_image_token": "<global-img>",
        },
        marks={"image": "<image>", "video": "<video>"},
    ),
    "qwen2_audio": _Maker(
        config={
            "model_type": "qwen2_audio",
            "audio_token_index": "<|AUDIO|>",
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "num_mel_bins": 16,
                "max_source_positions": 100,
            },
        },
        text=_QWEN2,
        files={
            "preprocessor_config.json": {**_AUDIO, "chunk_length": 2, "processor_class": "Qwen2AudioProcessor"},
            "processor_config.json": {"audio_token": "<|AUDIO|>", "processor_class": "Qwen2AudioProcessor"},
        },
        tokens=("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        marks={"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
    ),
    "voxtral": _Maker(
        config={
            "model_type": "voxtral",
            "audio_token_id": "[AUDIO]",
            "audio_config": {
                "model_type": "voxtral_encoder",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 128,
                "num_mel_bins": 16,
                "max_source_positions": 1500,
            },
        },
        text=_LLAMA,
        files={
            "preprocessor_config.json": {**_AUDIO, "chunk_length": 30, "processor_class": "VoxtralProcessor"},
            "processor_config.json": {"processor_class": "VoxtralProcessor"},
        },
        tokens=("[AUDIO]", "[BEGIN_AUDIO]"),
        marks={"audio": "[BEGIN_AUDIO][AUDIO]"},
    ),
}
_MAKERS |= {name: _Maker(**description) for name, description in multimodal_towers.DESCRIPTIONS.items()}
FAMILIES = tuple(_MAKERS)
"""Names for ``save_multimodal_model``: model types of transformers, and LLaVA once per kind of vision encoder."""
IMAGE_FAMILIES = tuple(name for name in FAMILIES if name not in ("qwen2_audio", "voxtral", "qwen3_asr"))
AUDIO_FAMILIES = (
    *("qwen2_audio", "voxtral", "qwen3_asr", "qwen2_5_omni", "qwen3_omni_moe"),
    *("gemma4", "gemma4_unified"),
)


def _masks_of_unified(*, block_sequence_ids: Any = None, **inputs: Any) -> Any:
    """Return the masks of ``create_masks_for_vision_model`` for inputs with images.

    The forward pass of transformers' Gemma 4 Unified lets image tokens attend to later tokens in all layers. Gemma 4, Google's
    own code and transformers' masks for static caches let these tokens do so only in layers with windows.
    """
    if block_sequence_ids is None:
        return create_masks_for_generate(**inputs)
    return modeling_gemma4_unified.create_masks_for_vision_model(block_sequence_ids=block_sequence_ids, **inputs)


vars(modeling_gemma4_unified)["create_masks_for_generate"] = _masks_of_unified


def save_multimodal_model(
    family: str, directory: Path, *, seed: int = 0, text: Mapping[str, Any] | None = None, **changes: Any
) -> PreTrainedModel:
    """Write a checkpoint of one of ``FAMILIES`` to ``directory``. Return the model, or the thinker of an omni model, in
    float32, with transformers' attention.

    ``text``: changed fields in the config of the text model. ``changes``: changed fields in the config of the model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    maker = _MAKERS[family]
    tokenizer = _save_tokenizer(maker, directory)
    for name, content in maker.files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(_chat_template(maker.marks), encoding="utf-8")
    end = tokenizer.convert_tokens_to_ids(_END)
    ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": tokenizer.convert_tokens_to_ids(_PAD)}
    settings: dict[str, Any] = {
        key: tokenizer.convert_tokens_to_ids(value) if isinstance(value, str) and "_token_i" in key else value
        for key, value in maker.config.items()
    }
    settings["text_config"] = {**maker.text, **ids, **(text or {})}
    if maker.tower:
        settings["vision_config"] = dict(maker.tower)
    settings["tie_word_embeddings"] = settings["text_config"]["tie_word_embeddings"]
    settings |= changes
    if maker.section:
        settings = {"model_type": settings.pop("model_type"), maker.section: settings, "enable_audio_output": False}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    make: Any = AutoModelForMultimodalLM.from_config
    model: PreTrainedModel = make(config, dtype=torch.float32).eval()
    _randomize(model)
    if family.startswith("gemma4"):
        ids_of: Any = tokenizer.convert_tokens_to_ids
        _never_generate(model, ids_of(list(maker.tokens)))
    if model.generation_config is not None:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, ids["pad_token_id"]
    model.save_pretrained(directory)
    return getattr(model, "thinker", model)


@torch.no_grad()
def _randomize(model: PreTrainedModel) -> None:
    """Randomize the weights, with a variance so large that the tokens depend on all parts of the image."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "norm" not in name.rsplit(".", 2)[-2]:
            text = "language_model" in name or "lm_head" in name or "text_model" in name
            parameter.normal_(0.0, 0.3 if text else 0.2)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith(("std_bias", "std_scale")):
            buffer.uniform_(0.5, 1.5)
        elif name.endswith(("put_min", "put_max")):  # limits of Gemma 4's clipped linear layers
            buffer.fill_(2.0 if name.endswith("max") else -2.0)


@torch.no_grad()
def _never_generate(model: Any, token_ids: Sequence[int]) -> None:
    """Give these tokens the logit 0. transformers' Gemma 4 computes with another token if it generates a media token."""
    model.lm_head.weight[list(token_ids)] = 0.0


def _save_tokenizer(maker: _Maker, directory: Path) -> PreTrainedTokenizerFast:
    base = byte_level()
    base.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in (_PAD, _START, _END)])
    base.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in maker.tokens])
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=base,
        eos_token=_END,
        pad_token=_PAD,
        model_max_length=2048,
        extra_special_tokens=dict(maker.named),
    )
    if len(tokenizer) > VOCAB_SIZE:
        raise ValueError(f"{len(tokenizer)} tokens are more than {VOCAB_SIZE}")
    tokenizer.save_pretrained(directory)
    return tokenizer


def _chat_template(marks: Mapping[str, str]) -> str:
    parts = "".join(
        f"{{%- elif part.type == '{modality}' %}}{{{{- {json.dumps(mark)} }}}}" for modality, mark in marks.items()
    )
    return (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
        "{%- if message.content is string %}{{- message.content }}"
        "{%- else %}{%- for part in message.content %}{%- if part.type == 'text' %}{{- part.text }}"
        + parts
        + "{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image with slowly changing colors and some noise."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = image + random.integers(-20, 21, image.shape, dtype=np.int16)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def make_sound(seconds: float, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return tones with some noise, with 16000 samples per second."""
    random = np.random.default_rng(seed)
    time = np.arange(int(seconds * 16_000)) / 16_000
    tones = sum(np.sin(2 * np.pi * frequency * time) for frequency in random.uniform(100, 4000, 4))
    return np.asarray(0.2 * tones + 0.02 * random.standard_normal(len(time)), dtype=np.float32)
