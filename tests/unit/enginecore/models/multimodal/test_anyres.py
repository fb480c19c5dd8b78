"""Images in tiles: the number of their rows, alone and in a batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoProcessor, PreTrainedModel

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.models.multimodal.encoder import TowerEncoder
from penstock_enginecore.models.multimodal.families.base import Intake
from tests.fakes.multimodal_items import features, image_tensors, item
from tests.fakes.multimodal_models import make_image, save_multimodal_model

CPU = torch.device("cpu")


def load(path: Path) -> TowerEncoder:
    encoder = load_model(ModelConfig(path=str(path)), CPU, lambda line: None, with_towers=True).encoder
    assert isinstance(encoder, TowerEncoder)
    return encoder


@pytest.fixture(scope="module", params=["llava_next", "llava_onevision"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_multimodal_model(request.param, folder)
    return folder


def test_rows_are_as_many_as_transformers_puts_placeholders(directory: Path) -> None:
    make: Any = AutoProcessor
    processor = make.from_pretrained(directory)
    encoder = load(directory)
    intake: Any = encoder._family.by_modality["image"]
    sides = [*range(1, 12), 31, 32, 33, 60, 64, 65, 97, 128, 200]
    sizes = [[height, width] for height in sides for width in sides]
    expected = processor._get_num_multimodal_tokens(image_sizes=sizes).num_image_tokens
    assert [intake.num_embeds((height, width)) for height, width in sizes] == expected
    assert max(expected) <= intake.max_embeds


def test_the_largest_image_fits_into_a_prompt(directory: Path) -> None:
    config = ModelConfig(path=str(directory), max_model_len=60)
    encoder = load_model(config, CPU, lambda line: None, with_towers=True).encoder
    assert encoder is not None
    (info,) = (info for info in encoder.media if info.modality == "image")
    assert encoder.largest("image").num_embeds == info.max_embeds <= 60


def test_an_image_whose_tiles_are_not_those_of_its_size_is_refused(directory: Path) -> None:
    encoder = load(directory)
    tensors = image_tensors(directory.name.rstrip("0"), directory, (50, 40))
    encoder.start(item({**tensors, "image_sizes": torch.tensor([[30, 90]])}, 70))
    encoder.start(item({**tensors, "image_sizes": torch.tensor([[0, 90]])}, 70, identifier="two"))
    assert [each.failure for each in encoder.advance(0)] == [
        "pixel_values has 5 tiles; an image of 30x90 has 4",
        "image_sizes is 0x90; both must be above 0",
    ]


@pytest.fixture(scope="module")
def onevision(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("onevision")
    return folder, save_multimodal_model("llava_onevision", folder)


def test_one_of_several_images_is_one_tile(onevision: tuple[Path, Any]) -> None:
    directory, oracle = onevision
    make: Any = AutoImageProcessor
    processor = make.from_pretrained(directory, backend="pil")
    images = [make_image(50, 40), make_image(30, 90)]
    encoder = load(directory)
    raw, normalized = (
        processor(images=[images], return_tensors="pt", **options)
        for options in ({"do_rescale": False, "do_normalize": False}, {})
    )
    config = oracle.config
    with torch.no_grad():
        expected = oracle.model.get_image_features(
            **normalized,
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            vision_aspect_ratio=config.vision_aspect_ratio,
        ).pooler_output
    assert [len(each) for each in expected] == [17, 17]
    for index in (0, 1):
        alone = {name: raw[name][index : index + 1] for name in ("pixel_values", "image_sizes")}
        encoder.start(item({**alone, "batch_num_images": torch.tensor([2])}, 17))
        (done,) = encoder.advance(10**9)
        assert done.rows is not None, done.failure
        torch.testing.assert_close(done.rows, expected[index], rtol=1e-5, atol=1e-5)


def test_one_of_several_images_in_tiles_is_refused(onevision: tuple[Path, Any]) -> None:
    encoder = load(onevision[0])
    tensors = image_tensors("llava_onevision", onevision[0], (50, 40))
    encoder.start(item({**tensors, "batch_num_images": torch.tensor([2])}, 17))
    (done,) = encoder.advance(0)
    assert done.failure == "pixel_values has 5 tiles; if a prompt has several images, each image must have 1 tile"


def test_a_squeezed_image_counts_by_what_is_left(onevision: tuple[Path, Any]) -> None:
    directory, oracle = onevision
    encoder = load(directory)
    for size in ((96, 96), (90, 96), (96, 66)):
        expected = features(oracle, "image", image_tensors("llava_onevision", directory, size, raw=False))
        intake: Intake = encoder._family.by_modality["image"]
        assert intake.count(image_tensors("llava_onevision", directory, size)) == len(expected)
