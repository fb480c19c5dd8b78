"""Descriptions of tiny checkpoints with vision or audio encoders, in addition to those in ``multimodal_models``."""

from collections.abc import Mapping
from typing import Any

PATCH = 8
_TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_HEAD = {"head_dim": 16}
_SECTIONS = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
_HALF_SECTIONS = {**_SECTIONS, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}

# GLM-4.1V and its successors.

_GLM_PIXELS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "resample": 3,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_GLM_TOKENS = (
    *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
)
_GLM_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 4 * PATCH,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_GLM_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}


def _glm(model_type: str, prefix: str, text: Mapping[str, Any], tower: str = "glm4v_vision") -> dict[str, Any]:
    processor = f"{prefix}Processor"
    return {
        "config": {
            "model_type": model_type,
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
        "text": text,
        "tower": {"model_type": tower, **_GLM_TOWER},
        "files": {
            "preprocessor_config.json": {
                **_GLM_PIXELS,
                "image_processor_type": f"{prefix}ImageProcessor",
                "processor_class": processor,
                "size": {"shortest_edge": 8 * PATCH**2, "longest_edge": 128 * PATCH**2},
            },
            "video_preprocessor_config.json": {
                **_GLM_PIXELS,
                "video_processor_type": f"{prefix}VideoProcessor",
                "processor_class": processor,
                "size": {"shortest_edge": 8 * PATCH**2, "longest_edge": 512 * PATCH**2},
                "max_frames": 8,
            },
        },
        "tokens": _GLM_TOKENS,
        "marks": {
            "image": "<|begin_of_image|><|image|><|end_of_image|>",
            "video": "<|begin_of_video|><|video|><|end_of_video|>",
        },
    }


# Thinkers of Qwen2.5-Omni and Qwen3-Omni.

_OMNI_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_OMNI_SOUND = {
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "output_dim": 64,
    "num_mel_bins": 16,
}
_OMNI_PIXELS = {
    **_GLM_PIXELS,
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 4 * PATCH**2,
    "max_pixels": 64 * PATCH**2,
}


def _omni(
    model_type: str,
    tokens: Mapping[str, str],
    text: Mapping[str, Any],
    tower: Mapping[str, Any],
    sound: Mapping[str, Any],
    length: int,
) -> dict[str, Any]:
    processor = {"qwen2_5_omni": "Qwen2_5OmniProcessor", "qwen3_omni_moe": "Qwen3OmniMoeProcessor"}[model_type]
    index = "index" if model_type == "qwen2_5_omni" else "id"
    return {
        "config": {
            "model_type": model_type,
            f"image_token_{index}": tokens["image_token"],
            f"video_token_{index}": tokens["video_token"],
            f"audio_token_{index}": tokens["audio_token"],
            "vision_start_token_id": tokens["vision_bos_token"],
            "vision_end_token_id": tokens["vision_eos_token"],
            "audio_start_token_id": tokens["audio_bos_token"],
            "audio_end_token_id": tokens["audio_eos_token"],
            "audio_config": {"model_type": f"{model_type}_audio_encoder", **_OMNI_SOUND, **sound},
        },
        "section": "thinker_config",
        "text": {"model_type": f"{model_type}_text", **_TEXT, **text},
        "tower": {"model_type": f"{model_type}_vision_encoder", **_OMNI_TOWER, **tower},
        "files": {
            # One file for images and sound, as in the checkpoints on the hub.
            "preprocessor_config.json": {
                **_OMNI_PIXELS,
                "feature_extractor_type": "WhisperFeatureExtractor",
                "feature_size": 16,
                "hop_length": 160,
                "n_fft": 400,
                "chunk_length": length,
                "sampling_rate": 16_000,
                "padding_value": 0.0,
                "return_attention_mask": True,
                "processor_class": processor,
            },
            "video_preprocessor_config.json": {
                **_OMNI_PIXELS,
                "video_processor_type": "Qwen2VLVideoProcessor",
                "processor_class": processor,
            },
        },
        "tokens": tuple(tokens.values()),
        "named": tokens,
        "marks": {
            "image": "{vision_bos_token}{image_token}{vision_eos_token}".format(**tokens),
            "audio": "{audio_bos_token}{audio_token}{audio_eos_token}".format(**tokens),
        },
    }


_OMNI_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_OMNI3_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_OMNI3_TEXT = {
    **_HEAD,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "rope_parameters": {**_SECTIONS, "mrope_interleaved": True},
}
_OMNI3_TOWER = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}

_GLM_TEXT = {"model_type": "glm4v_text", **_TEXT, "rope_parameters": _HALF_SECTIONS}
_GLM_MOE_TEXT = {"model_type": "glm4v_moe_text", **_TEXT, **_GLM_MOE, "rope_parameters": _HALF_SECTIONS}
_OCR_TEXT = {"model_type": "glm_ocr_text", **_TEXT, **_HEAD, "rope_parameters": _SECTIONS}

_LLAMA4_TOKENS = (
    *("<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
)
_PADDLE_TOKENS = ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>")

DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "glm4v": _glm("glm4v", "Glm4v", _GLM_TEXT),
    "glm46v": _glm("glm46v", "Glm46V", _GLM_TEXT),
    "glm4v_moe": _glm("glm4v_moe", "Glm4v", _GLM_MOE_TEXT, "glm4v_moe_vision"),
    "glm_ocr": _glm("glm_ocr", "Glm46V", _OCR_TEXT, "glm_ocr_vision"),
    "qwen2_5_omni": _omni(
        "qwen2_5_omni",
        _OMNI_TOKENS,
        {"rope_parameters": _SECTIONS},
        {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]},
        {"n_window": 20},
        3,
    ),
    "qwen3_omni_moe": _omni(
        "qwen3_omni_moe",
        _OMNI3_TOKENS,
        _OMNI3_TEXT,
        _OMNI3_TOWER,
        {"n_window_infer": 200, "downsample_hidden_size": 8},
        30,
    ),
    "llama4": {
        "config": {"model_type": "llama4", "image_token_id": "<|patch|>"},
        "text": {
            "model_type": "llama4_text",
            **_TEXT,
            **_HEAD,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "attention_chunk_size": 24,
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
        },
        "tower": {
            "hidden_size": 32,
            "intermediate_size": 128,  # four patches, merged
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 4 * PATCH,
            "patch_size": PATCH,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
            "vision_output_dim": 48,
        },
        "files": {
            "preprocessor_config.json": {
                "image_processor_type": "Llama4ImageProcessor",
                "processor_class": "Llama4Processor",
                "size": {"height": 4 * PATCH, "width": 4 * PATCH},
                "max_patches": 4,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "resample": 2,
            },
            "processor_config.json": {"patch_size": PATCH, "processor_class": "Llama4Processor"},
        },
        "tokens": _LLAMA4_TOKENS,
        "marks": {"image": "<|image|>"},
    },
    "paddleocr_vl": {
        "config": {
            "model_type": "paddleocr_vl",
            "image_token_id": _PADDLE_TOKENS[1],
            "vision_start_token_id": _PADDLE_TOKENS[0],
            "vision_end_token_id": _PADDLE_TOKENS[2],
        },
        "text": {"model_type": "paddleocr_vl_text", **_TEXT, **_HEAD, "rope_parameters": _SECTIONS},
        "tower": {
            "model_type": "paddleocr_vl_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 4 * PATCH,
            "patch_size": PATCH,
            "temporal_patch_size": 2,
        },
        "files": {
            "preprocessor_config.json": {
                **{key: value for key, value in _GLM_PIXELS.items() if key != "temporal_patch_size"},
                "image_processor_type": "PaddleOCRVLImageProcessor",
                "processor_class": "PaddleOCRVLProcessor",
                "min_pixels": 4 * PATCH**2,
                "max_pixels": 64 * PATCH**2,
            },
        },
        "tokens": _PADDLE_TOKENS,
        "named": {"image_token": _PADDLE_TOKENS[1]},
        "marks": {"image": "".join(_PADDLE_TOKENS)},
    },
    "qwen3_asr": {
        "config": {
            "model_type": "qwen3_asr",
            "audio_token_id": "<|audio_pad|>",
            "audio_config": {
                "model_type": "qwen3_asr_encoder",
                **_OMNI_SOUND,
                "n_window_infer": 200,
                "downsample_hidden_size": 8,
            },
        },
        "text": {"model_type": "qwen3", **_TEXT, **_HEAD},
        "files": {
            "preprocessor_config.json": {
                "feature_extractor_type": "Qwen3ASRFeatureExtractor",
                "feature_size": 16,
                "hop_length": 160,
                "n_fft": 400,
                "sampling_rate": 16_000,
                "padding_value": 0.0,
                "return_attention_mask": True,
                "min_length": 8000,
                "processor_class": "Qwen3ASRProcessor",
            },
        },
        "tokens": ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
        "named": {
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        "marks": {"audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
    },
}
"""Arguments of a description in ``multimodal_models``, by model type."""
