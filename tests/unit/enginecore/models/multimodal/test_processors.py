"""Pixel values equal those of the checkpoint's processor in transformers, bit by bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPImageProcessorPil

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.multimodal.processors import Normalization, ProcessorSettings
from tests.fakes.multimodal_models import save_multimodal_model

SETTINGS = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
LEVELS = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (3, 16, 16)).copy()
"""An image that contains each value in each colour."""


def of_transformers(**settings: Any) -> torch.Tensor:
    make: Any = CLIPImageProcessorPil
    processor = make(do_resize=False, do_center_crop=False, **settings)
    found: torch.Tensor = processor(images=[LEVELS], return_tensors="pt", input_data_format="channels_first")[
        "pixel_values"
    ]
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rescale_factor": 1 / 127.5},
        {"do_rescale": False},
        {"do_normalize": False},
        {"image_mean": 0.5, "image_std": 0.25},
        {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    ],
)
def test_every_value_becomes_what_transformers_makes_of_it(changes: dict[str, Any]) -> None:
    settings = {**SETTINGS, **changes}
    found = Normalization.of(settings).apply(torch.from_numpy(LEVELS)[None], 1)
    assert found.dtype == torch.float32
    assert torch.equal(found, of_transformers(**settings).float())


@pytest.mark.parametrize("channels", [0, 1, 2])
def test_colours_may_stand_in_any_dimension(channels: int) -> None:
    normalization = Normalization.of(SETTINGS)
    pixels = torch.from_numpy(LEVELS)
    expected = normalization.apply(pixels, 0)
    found = normalization.apply(pixels.movedim(0, channels), channels)
    assert torch.equal(found.movedim(channels, 0), expected)
    assert found.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_normalized_already(dtype: torch.dtype) -> None:
    given = torch.linspace(-2, 2, 27).view(1, 3, 3, 3).to(dtype)
    assert torch.equal(Normalization.of(SETTINGS).apply(given, 1), given.float())


def test_other_numbers_of_colours_are_refused() -> None:
    with pytest.raises(ValueError, match="pixels have 4 colours; the checkpoint's processor normalizes 3"):
        Normalization.of(SETTINGS).apply(torch.zeros(1, 4, 2, 2, dtype=torch.uint8), 1)


def write(folder: Path, name: str, **content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def table(folder: Path, part: str = "image") -> torch.Tensor:
    settings = ProcessorSettings.read(folder)
    return settings.normalization(getattr(settings, part)).table


def test_settings_are_those_of_the_preprocessor(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", **SETTINGS)
    assert torch.equal(table(tmp_path), Normalization.of(SETTINGS).table)


def test_a_processors_own_file_goes_first(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", image_mean=[0.0] * 3, image_std=[1.0] * 3)
    write(tmp_path, "processor_config.json", image_processor=SETTINGS)
    assert torch.equal(table(tmp_path), Normalization.of(SETTINGS).table)


def test_video_has_settings_of_its_own_or_those_of_images(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", **SETTINGS)
    assert torch.equal(table(tmp_path, "video"), table(tmp_path))
    write(tmp_path, "video_preprocessor_config.json", image_mean=0.0, image_std=1.0)
    assert not torch.equal(table(tmp_path, "video"), table(tmp_path))


def test_what_a_file_leaves_out_is_that_of_the_processors_class(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    expected = table(tmp_path)
    write(tmp_path, "preprocessor_config.json", image_processor_type="CLIPImageProcessor")
    assert torch.equal(table(tmp_path), expected)


def test_a_default_that_is_not_known_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not set image_mean"):
        table(tmp_path)


@pytest.mark.parametrize(("content", "said"), [("{", "cannot be read"), ("[]", "is not a JSON object with settings")])
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=said):
        ProcessorSettings.read(tmp_path)
