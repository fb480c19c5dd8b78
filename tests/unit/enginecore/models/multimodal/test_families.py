"""Embeddings of every family are those of transformers' model, to the bit, however they are computed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForMultimodalLM, PreTrainedModel

from penstock_common.checkpoint import WITH_TOWERS
from penstock_common.types.media import Modality
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.models.multimodal.base import EncodedItem, EncoderItem, MediaEncoder
from penstock_enginecore.models.multimodal.composite import _FAMILIES
from tests.fakes.multimodal_items import (
    VIDEO_FAMILIES,
    Tensors,
    audio_tensors,
    features,
    image_tensors,
    item,
    video_tensors,
)
from tests.fakes.multimodal_models import AUDIO_FAMILIES, FAMILIES, IMAGE_FAMILIES, save_multimodal_model

CPU = torch.device("cpu")
SIZES = [(50, 40), (40, 90), (130, 33), (32, 32)]
"""Widths and heights of images."""
ALL_AT_ONCE = 10**9
BLOCKS = 2
"""Number of layers of each tiny encoder, without CLIP's unused last layer."""
WITHOUT_LAYERS = "gemma4_unified"
"""Family without encoder layers. Its projection counts as one layer."""
UNUSED = 4 * (32 * 32 + 32) + 2 * 32 * 48 + 48 + 32 + 4 * 32
"""Number of parameters of one layer (attention, MLP and two norms), as in CLIP's unused last layer."""


class Model(NamedTuple):
    """transformers' model of a checkpoint, and the served model."""

    family: str
    directory: Path
    oracle: PreTrainedModel
    loaded: LoadedModel

    @property
    def blocks(self) -> int:
        return 1 if self.family == WITHOUT_LAYERS else BLOCKS

    @property
    def encoder(self) -> MediaEncoder:
        assert self.loaded.encoder is not None
        return self.loaded.encoder


_KINDS = {
    "llava",  # CLIP with one image size
    "llava_onevision",  # tiles that are joined and downsampled, and video
    "llava_pixtral",  # images of any size
    "qwen3_vl",  # patches with a grid, video, deepstack
    "idefics3",  # tiles with a mask, another name of the text model
    "qwen2_audio",  # audio shorter than a window
    "gemma4",  # images, video and audio, whose encoders have separate layers
}


@pytest.fixture(
    scope="module",
    params=[name if name in _KINDS else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp(request.param)
    oracle = save_multimodal_model(request.param, directory)
    loaded = load_model(ModelConfig(path=str(directory)), CPU, lambda line: None, with_towers=True)
    return Model(request.param, directory, oracle, loaded)


def items(model: Model) -> Iterator[tuple[Modality, Tensors, Tensors]]:
    """Return items of each modality, with raw and with normalized tensors."""
    family, directory = model.family, model.directory
    if family in IMAGE_FAMILIES:
        for size in SIZES:
            yield "image", image_tensors(family, directory, size), image_tensors(family, directory, size, raw=False)
    if family in VIDEO_FAMILIES:
        for frames in (2, 4):
            yield "video", video_tensors(directory, frames), video_tensors(directory, frames, raw=False)
    if family in AUDIO_FAMILIES:
        for seconds in (0.4, 1.3):
            yield "audio", audio_tensors(family, directory, seconds), audio_tensors(family, directory, seconds)


def encode(encoder: MediaEncoder, wanted: EncoderItem, budget: int = ALL_AT_ONCE) -> tuple[EncodedItem, int]:
    """Return the encoded item, and the number of slices that it took."""
    encoder.start(wanted)
    for slices in range(1, 100):
        if done := encoder.advance(budget):
            (encoded,) = done
            return encoded, slices
    raise AssertionError("it is never done")


def rows(encoder: MediaEncoder, wanted: EncoderItem, budget: int = ALL_AT_ONCE) -> torch.Tensor:
    encoded, _ = encode(encoder, wanted, budget)
    assert encoded.failure == ""
    assert encoded.rows is not None
    return encoded.rows


def test_the_families_are_those_that_are_told_of_before_anything_is_loaded() -> None:
    assert sorted(WITH_TOWERS) == sorted(_FAMILIES)
    assert {name.removesuffix("_siglip").removesuffix("_pixtral") for name in FAMILIES} == set(WITH_TOWERS)


def test_rows_are_those_of_transformers(model: Model) -> None:
    for modality, raw, normalized in items(model):
        expected = features(model.oracle, modality, normalized)
        assert torch.equal(rows(model.encoder, item(normalized, len(expected), modality)), expected)
        found = rows(model.encoder, item(raw, len(expected), modality))
        if modality == "video" or model.family == WITHOUT_LAYERS:
            # transformers normalizes video, and images that it processes with torchvision, in other steps than images
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        else:
            assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4v", "glm_ocr", "paddleocr_vl", "qwen3_omni_moe", "qwen3_asr"])
def test_rows_in_bfloat16_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    save_multimodal_model(family, tmp_path)
    read: Any = AutoModelForMultimodalLM.from_pretrained
    whole = read(tmp_path, dtype=torch.bfloat16).eval()
    oracle = getattr(whole, "thinker", whole)
    loaded = load_model(ModelConfig(path=str(tmp_path), dtype="bfloat16"), CPU, lambda line: None, with_towers=True)
    model = Model(family, tmp_path, oracle, loaded)
    for modality, raw, normalized in items(model):
        halves = {name: each.bfloat16() if each.is_floating_point() else each for name, each in normalized.items()}
        expected = features(oracle, modality, halves)
        found = rows(model.encoder, item(raw, len(expected), modality))
        assert found.dtype == torch.bfloat16
        if modality == "video":  # transformers normalizes video in other steps than images
            torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
        else:
            assert torch.equal(found, expected)


def test_rows_are_the_same_in_slices(model: Model) -> None:
    for modality, raw, normalized in items(model):
        count = len(features(model.oracle, modality, normalized))
        whole = rows(model.encoder, item(raw, count, modality))
        sliced, slices = encode(model.encoder, item(raw, count, modality), budget=1)
        assert slices == model.blocks
        assert sliced.rows is not None
        assert torch.equal(sliced.rows, whole)


def test_rows_do_not_depend_on_what_else_is_encoded(model: Model) -> None:
    wanted: list[EncoderItem] = []
    alone: dict[str, torch.Tensor] = {}
    for number, (modality, raw, normalized) in enumerate(items(model)):
        wanted.append(item(raw, len(features(model.oracle, modality, normalized)), modality, str(number)))
        alone[str(number)] = rows(model.encoder, wanted[-1])
    for each in wanted:
        model.encoder.start(each)
    found: dict[str, Any] = {}
    while model.encoder.has_work:
        found |= {each.identifier: each.rows for each in model.encoder.advance(3 * wanted[0].num_embeds)}
    assert found.keys() == alone.keys()
    assert list(found) == [each.identifier for each in wanted]
    for identifier, expected in alone.items():
        assert torch.equal(found[identifier], expected)


def test_no_item_has_more_rows_than_the_largest(model: Model) -> None:
    for info in model.encoder.media:
        largest = model.encoder.largest(info.modality)
        assert rows(model.encoder, largest).shape == (largest.num_embeds, model.encoder.width)
        assert largest.num_embeds <= info.max_embeds <= info.max_tokens
    most = {info.modality: info.max_embeds for info in model.encoder.media}
    for modality, _, normalized in items(model):
        assert len(features(model.oracle, modality, normalized)) <= most[modality]


def test_blocks_are_counted_whose_states_are_used(model: Model) -> None:
    assert {info.num_blocks for info in model.encoder.media} == {model.blocks}


def test_the_text_model_computes_what_the_whole_model_does(model: Model) -> None:
    loaded = load_model(ModelConfig(path=str(model.directory)), CPU, lambda line: None)
    assert loaded.encoder is None
    token_ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    # Aya Vision's class leaves out the logit scale with which its text model was trained.
    factor = getattr(loaded.module, "logit_scale", 1.0)
    with torch.no_grad():
        expected: Any = model.oracle(input_ids=token_ids)
        loaded.module.set_attn_implementation("sdpa")
        found: Any = loaded.module(input_ids=token_ids)
    torch.testing.assert_close(found.logits, expected.logits * factor, rtol=1e-5, atol=1e-5)


def test_weights_are_there_once(model: Model) -> None:
    towers = {each.data_ptr() for module in model.encoder.modules for each in module.parameters()}
    text = {each.data_ptr() for each in model.loaded.module.parameters()}
    assert not towers & text
    found = sum(
        each.numel() for module in (model.loaded.module, *model.encoder.modules) for each in module.parameters()
    )
    unused = UNUSED if model.family in ("llava", "llava_next") else 0
    assert found == sum(each.numel() for each in model.oracle.parameters()) - unused
