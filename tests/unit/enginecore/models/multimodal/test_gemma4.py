"""Items of Gemma 4 that would read beyond the encoder's tables, or do not fit a prompt, are refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock_common.types.media import Modality
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.models.multimodal.base import MediaEncoder
from tests.fakes.multimodal_items import Tensors, audio_tensors, image_tensors, item, video_tensors
from tests.fakes.multimodal_models import save_multimodal_model

NAMES = ("gemma4", "gemma4_unified")


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("models") / request.param
    save_multimodal_model(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def encoder(folder: Path) -> MediaEncoder:
    return load(folder)


def load(folder: Path) -> MediaEncoder:
    loaded = load_model(ModelConfig(path=str(folder)), torch.device("cpu"), lambda line: None, with_towers=True)
    assert loaded.encoder is not None
    return loaded.encoder


def failure(encoder: MediaEncoder, tensors: Tensors, modality: Modality = "image") -> str:
    encoder.start(item(tensors, 5, modality))
    (done,) = encoder.advance(10**9)
    return done.failure


def _hole(positions: torch.Tensor) -> None:
    positions[0, 3] = -1


def _order(positions: torch.Tensor) -> None:
    positions[0, [0, 1]] = positions[0, [1, 0]]


def _beyond(positions: torch.Tensor) -> None:
    positions[0, -1] = 2**40


def _empty(positions: torch.Tensor) -> None:
    positions[:] = -1


@pytest.mark.parametrize("change", [_hole, _order, _beyond, _empty])
def test_positions_that_are_no_grid_are_refused(
    folder: Path, encoder: MediaEncoder, change: Callable[[torch.Tensor], None]
) -> None:
    tensors = image_tensors(folder.name, folder)
    change(tensors["image_position_ids"])
    assert "image_position_ids" in failure(encoder, tensors)
    assert "grid" in failure(encoder, tensors)


def test_pictures_with_positions_of_other_pictures_are_refused(folder: Path, encoder: MediaEncoder) -> None:
    tensors = video_tensors(folder)
    tensors["video_position_ids"][1] = tensors["video_position_ids"][1].flip(0)
    assert "the same for all pictures" in failure(encoder, tensors, "video")
    tensors["video_position_ids"] = tensors["video_position_ids"][:, 1:]
    assert "the first two numbers must be equal" in failure(encoder, tensors, "video")


def test_items_that_are_larger_than_the_largest_are_refused(folder: Path, encoder: MediaEncoder) -> None:
    for modality, limit in (("image", "70"), ("audio", "50")):
        largest = encoder.largest(modality)  # type: ignore[arg-type]
        assert largest.num_embeds == int(limit)
    sound = audio_tensors(folder.name, folder, 2.2)
    assert "the limit is 50" in failure(encoder, sound, "audio")
    frames = video_tensors(folder, frames=5)
    assert "has 5 pictures; the limit is 4" in failure(encoder, frames, "video")


def test_masks_with_holes_are_refused(folder: Path, encoder: MediaEncoder) -> None:
    sound = audio_tensors(folder.name, folder)
    sound["input_features_mask"][0, 1] = False
    assert "must be 1 from the first vector" in failure(encoder, sound, "audio")


def test_features_that_do_not_fit_the_audio_encoder_are_refused(tmp_path: Path) -> None:
    save_multimodal_model("gemma4", tmp_path)
    file = tmp_path / "processor_config.json"
    file.write_text(file.read_text().replace('"feature_size": 16', '"feature_size": 24'))
    with pytest.raises(ModelLoadError, match="feature_size of the checkpoint's feature extractor is 24"):
        load(tmp_path)


def test_a_model_whose_tokens_all_attend_both_ways_is_refused(tmp_path: Path) -> None:
    save_multimodal_model("gemma4", tmp_path, text={"use_bidirectional_attention": "all"})
    with pytest.raises(ModelLoadError, match="use_bidirectional_attention of its text model is 'all'"):
        load(tmp_path)
