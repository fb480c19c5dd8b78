"""Every multimodal model type, from prompts with media to tokens, in one process.

Tokens equal those of transformers' processor and ``generate``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.video_utils import VideoMetadata

from penstock_local import LLM
from tests.fakes.multimodal_items import WITHOUT_PILLOW
from tests.fakes.multimodal_models import IMAGE_FAMILIES, SIDE, make_image, make_sound, save_multimodal_model

pytestmark = pytest.mark.slow

NEW = 8
GREEDY = {"temperature": 0, "max_tokens": NEW, "min_tokens": NEW}
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory": "64MiB", "num_threads": 1}
VIDEOS = {
    "qwe": "<|vision_start|><|video_pad|><|vision_end|>",
    "glm": "<|begin_of_video|><|video|><|end_of_video|>",
}
"""Placeholder of a video, by the first letters of the model type."""
TALKS: list[list[str | Image.Image]] = [
    ["see ", make_image(80, 60, 1), "\nwhat is this?"],
    ["see ", make_image(50, 90, 2), " and ", make_image(64, 64, 3), make_image(120, 40, 4), "?"],
    ["only words"],
]


def processor_of(folder: Path) -> Any:
    smolvlm: Any = processing_smolvlm
    if smolvlm.num2words is None:
        smolvlm.num2words = str  # writes numbers of video frames as words, which these tests do not need
    load: Any = AutoProcessor.from_pretrained
    processor, load = load(folder), AutoImageProcessor.from_pretrained
    processor.image_processor = load(folder, backend="torchvision" if type_of(folder) in WITHOUT_PILLOW else "pil")
    return processor


def type_of(folder: Path) -> str:
    config: Any = AutoConfig.from_pretrained(folder)
    return str(config.model_type)


def generated(model: Any, inputs: Any) -> list[int]:
    # Llama 4's processor returns pixels in bfloat16.
    given = {name: each.float() if each.dtype == torch.bfloat16 else each for name, each in inputs.items()}
    with torch.no_grad():
        found = model.generate(**given, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    return [int(token) for token in found[0, inputs["input_ids"].shape[1] :]]


def part(kind: str, content: str | Image.Image) -> dict[str, Any]:
    return {"type": "text", "text": content} if isinstance(content, str) else {"type": kind, kind: content}


def message(kind: str, content: Sequence[str | Image.Image]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part(kind, each) for each in content]}]


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_conversations_with_images_are_answered_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = save_multimodal_model(name, tmp_path)
    with LLM(str(tmp_path), **ENGINE) as llm:
        answers = llm.chat([message("image_pil", talk) for talk in TALKS], GREEDY, progress=False)
    processor = processor_of(tmp_path)
    for talk, answer in zip(TALKS, answers, strict=True):
        inputs = processor.apply_chat_template(
            message("image", talk), tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        assert list(answer.prompt_token_ids) == inputs["input_ids"][0].tolist()
        assert list(answer.outputs[0].token_ids) == generated(model, inputs)


VIDEO_SIZES = {
    "internvl": (SIDE, SIDE),
    "llava_onevision": (SIDE, SIDE),
    "gemma4": (96, 96),
    "gemma4_unified": (96, 96),
}
"""Width and height of frames that need no resizing, where these are not those of the Qwen families."""


@pytest.mark.parametrize(
    "name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v", *VIDEO_SIZES]
)
def test_videos_are_answered_as_transformers_does(name: str, tmp_path: Path) -> None:
    """Uses frames that need no resizing, because Pillow and torchvision resize differently."""
    model = save_multimodal_model(name, tmp_path)
    frames = [make_image(*VIDEO_SIZES.get(name, (64, 48)), i) for i in range(4)]
    placeholder = "<|video|>" if name.startswith("gemma") else VIDEOS.get(name[:3], "<video>")
    text = f"look {placeholder} what"
    with LLM(str(tmp_path), **ENGINE) as llm:
        prompt = {"prompt": text, "multi_modal_data": {"video": [frames]}}
        (answer,) = llm.generate(prompt, GREEDY, progress=False)
    metadata = [VideoMetadata(total_num_frames=4, fps=1.0, frames_indices=[0, 1, 2, 3])]
    kwargs = {"do_sample_frames": False, "video_metadata": metadata, "return_metadata": True}
    video = np.stack([np.asarray(frame) for frame in frames])
    inputs = dict(processor_of(tmp_path)(text=text, videos=[video], videos_kwargs=kwargs, return_tensors="pt"))
    inputs.pop("video_metadata", None)
    assert list(answer.prompt_token_ids) == inputs["input_ids"][0].tolist()
    assert list(answer.outputs[0].token_ids) == generated(model, inputs)


@pytest.mark.parametrize(
    "name", ["qwen2_audio", "qwen2_5_omni", "qwen3_omni_moe", "qwen3_asr", "gemma4", "gemma4_unified"]
)
def test_sound_is_answered_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = save_multimodal_model(name, tmp_path)
    clips = [make_sound(0.7, 1), make_sound(0.7 if name == "qwen3_omni_moe" else 1.3, 2)]
    placeholder = "<|audio|>" if name.startswith("gemma") else "<|audio_bos|><|AUDIO|><|audio_eos|>"
    if name.startswith("qwen3"):  # transformers pads its sounds to the longest sound of a prompt
        placeholder = "<|audio_start|><|audio_pad|><|audio_end|>"
    text = f"hear {placeholder} and {placeholder} {'who speaks?' if name.startswith('gemma') else 'what'}"
    if name == "qwen3_asr":  # transformers' processor accepts one sound
        del clips[1:]
        text = f"hear {placeholder} what"
    with LLM(str(tmp_path), **ENGINE) as llm:
        prompt = {"prompt": text, "multi_modal_data": {"audio": [(clip, 16_000) for clip in clips]}}
        (answer,) = llm.generate(prompt, GREEDY, progress=False)
    load: Any = AutoProcessor.from_pretrained
    inputs = load(tmp_path)(text=text, audio=clips, return_tensors="pt", sampling_rate=16_000)
    assert list(answer.prompt_token_ids) == inputs["input_ids"][0].tolist()
    assert list(answer.outputs[0].token_ids) == generated(model, inputs)
