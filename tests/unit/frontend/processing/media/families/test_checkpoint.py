"""The media family of a checkpoint, and unsupported families."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import ConfigError
from penstock_frontend.processing.media.families.checkpoint import load_family, why_text_alone
from penstock_frontend.processing.media.families.tensors import PilImages
from tests.fakes.models import small_tokenizers
from tests.fakes.multimodal_models import IMAGE_FAMILIES, save_multimodal_model


def encode(text: str) -> list[int]:
    return list(small_tokenizers.byte_level().encode(text, add_special_tokens=False).ids)


def described(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, {"model_type": "qwen3", "vision_config": None}])
def test_a_model_without_a_tower_has_no_family(tmp_path: Path, config: dict[str, Any]) -> None:
    assert load_family(described(tmp_path, config), encode) is None


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("mllama", "attends to images in separate cross-attention layers"),
        ("paligemma", "prompts use bidirectional attention"),
        ("kimi_k25", "supported model types are llava, .*; to serve its text model alone, use --no-media"),
    ],
)
def test_a_model_whose_media_are_not_served_is_refused_by_name(tmp_path: Path, model_type: str, why: str) -> None:
    folder = described(tmp_path, {"model_type": model_type, "vision_config": {"model_type": "x"}})
    with pytest.raises(ConfigError, match=f"media of {model_type} are not supported[:;] .*{why}"):
        load_family(folder, encode)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "llama"}, ""),
        ({"model_type": "llava", "vision_config": {"model_type": "x"}}, "media are disabled (media.enabled is false)"),
        (
            {"model_type": "kimi_k25", "vision_config": {"model_type": "x"}},
            "the media encoders of kimi_k25 models are not supported",
        ),
        (
            {"model_type": "unknown_omni", "thinker_config": {"model_type": "x"}},
            "the media encoders of unknown_omni models are not supported",
        ),
    ],
)
def test_a_frontend_without_media_knows_why(tmp_path: Path, config: dict[str, Any], why: str) -> None:
    assert why_text_alone(described(tmp_path, config), encode) == why


def test_an_image_processor_that_torchvision_alone_has_is_refused_by_name(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Llama4ImageProcessor"}')
    with pytest.raises(ConfigError, match="its image processor, Llama4ImageProcessor, exists only for torchvision"):
        PilImages(tmp_path)


def test_a_tokenizer_without_the_placeholder_is_told_of(tmp_path: Path) -> None:
    folder = described(tmp_path, {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}})
    (folder / "preprocessor_config.json").write_text('{"size": {"height": 32, "width": 32}}')
    (folder / "processor_config.json").write_text('{"patch_size": 8}')
    with pytest.raises(ConfigError, match="the tokenizer has no token '<image>'"):
        load_family(folder, encode)


def test_the_identity_is_of_everything_that_rows_depend_on(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    tokens = {"<image>": [300]}

    def identity() -> bytes:
        family = load_family(tmp_path, lambda text: tokens.get(text, [1, 2]))
        assert family is not None
        return family.identity

    before = identity()
    file = tmp_path / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(settings.items()))))
    assert identity() == before
    file.write_text(json.dumps({**settings, "image_mean": [0.1, 0.2, 0.3]}))
    assert identity() != before


WITHOUT_TORCH = """
import sys
for name in ("torch", "torchvision", "torchaudio", "tensorflow", "jax"):
    sys.modules[name] = None
import pickle
from pathlib import Path
import tokenizers
from PIL import Image
from penstock_frontend.processing.media.families.checkpoint import load_family
for folder in map(Path, sys.argv[1:]):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    family = load_family(folder, lambda text: backend.encode(text, add_special_tokens=False).ids)
    assert "transformers" not in sys.modules or folder != Path(sys.argv[1]), "the frontend's half has imported transformers"
    make = pickle.loads(pickle.dumps(family.make_processor()))
    item = make().image(Image.new("RGB", (90, 60), "red"), {})
    print(folder.name, item.num_embeds, item.data["pixel_values"].dtype)
"""


def test_no_family_needs_torch(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in IMAGE_FAMILIES]
    for folder in folders:
        save_multimodal_model(folder.name, folder)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *map(str, folders)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [(name, dtype) for name, _, dtype in lines] == [(name, "uint8") for name in IMAGE_FAMILIES]
