"""Processor arguments in requests: known ones are accepted within the checkpoint's own limits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from penstock_frontend.processing.media.families.base import Family, FamilyProcessor
from penstock_frontend.processing.media.families.checkpoint import load_family
from tests.fakes.multimodal_models import make_image, make_sound, save_multimodal_model

Loaded = Mapping[str, tuple[Family, FamilyProcessor]]
NAMES = ("llava", "llava_pixtral", "qwen2_vl", "idefics3", "internvl", "qwen2_audio")
IMAGE = make_image(300, 200)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    made = {}
    for name in NAMES:
        folder: Path = tmp_path_factory.mktemp("models") / name
        save_multimodal_model(name, folder)
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

        def encode(text: str, of: tokenizers.Tokenizer = backend) -> list[int]:
            return list(of.encode(text, add_special_tokens=False).ids)

        family = load_family(folder, encode)
        assert family is not None
        made[name] = (family, family.make_processor()())
    return made


@pytest.mark.parametrize(
    ("name", "kwargs", "rows"),
    [
        ("llava_pixtral", {}, 8 * 6),
        ("llava_pixtral", {"size": {"longest_edge": 32}}, 4 * 3),
        ("qwen2_vl", {}, 12),
        ("qwen2_vl", {"max_pixels": 1024}, 2),
        ("qwen2_vl", {"size": {"longest_edge": 1024}}, 2),
        ("qwen2_vl", {"min_pixels": 256, "max_pixels": 256}, 1),
        ("idefics3", {}, (3 * 2 + 1) * 4),
        ("idefics3", {"do_image_splitting": False}, 4),
        ("idefics3", {"size": {"longest_edge": 64}}, (2 * 2 + 1) * 4),
        ("internvl", {"max_patches": 2}, (2 + 1) * 4),
        ("internvl", {"crop_to_patches": False}, 4),
    ],
)
def test_an_argument_changes_how_many_rows_there_are(
    loaded: Loaded, name: str, kwargs: dict[str, Any], rows: int
) -> None:
    family, processor = loaded[name]
    item = processor.image(IMAGE, kwargs)
    assert item.num_embeds == rows
    assert family.replacements([item])[0].num_embeds == rows
    assert family.described("image", item.data) == item if name != "idefics3" else True


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "llava",
            {"size": {"height": 9, "width": 9}},
            "processor_kwargs.size is set; the model's processor accepts no arguments",
        ),
        ("llava", {"do_resize": False}, "processor_kwargs.do_resize is set"),
        ("llava_pixtral", {"patch_size": 1}, "processor_kwargs.patch_size is set; the model's processor accepts size"),
        ("llava_pixtral", {"size": {"longest_edge": 10**9}}, "longest_edge is 1000000000; it must be from 1 to 64"),
        (
            "llava_pixtral",
            {"size": {"height": 8}},
            "processor_kwargs.size.height is not known; the object may have longest_edge",
        ),
        ("llava_pixtral", {"size": 8}, "processor_kwargs.size is 8; it must be an object"),
        ("qwen2_vl", {"max_pixels": 10**12}, "processor_kwargs.max_pixels is 1000000000000; it must be from 1 to 4096"),
        ("qwen2_vl", {"max_pixels": "many"}, "processor_kwargs.max_pixels is 'many'; it must be a whole number"),
        ("qwen2_vl", {"max_pixels": True}, "it must be a whole number"),
        ("qwen2_vl", {"max_pixels": 1}, "max_pixels is 1; it must be at least 256"),
        (
            "qwen2_vl",
            {"min_pixels": 2048, "max_pixels": 1024},
            "min_pixels is 2048; it must be at most max_pixels, which is 1024",
        ),
        ("qwen2_vl", {"size": {"shortest_edge": 0}}, "shortest_edge is 0; it must be from 1"),
        ("idefics3", {"do_image_splitting": 1}, "processor_kwargs.do_image_splitting is 1; it must be true or false"),
        ("internvl", {"max_patches": 5}, "processor_kwargs.max_patches is 5; it must be from 1 to 4"),
        ("internvl", {"min_patches": 3, "max_patches": 2}, "processor_kwargs.min_patches is 3; it must be from 1 to 2"),
        ("internvl", {"return_tensors": "pt"}, "processor_kwargs.return_tensors is set"),
    ],
)
def test_other_arguments_are_refused(loaded: Loaded, name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loaded[name][1].image(IMAGE, kwargs)


def test_sound_takes_none(loaded: Loaded) -> None:
    with pytest.raises(
        ValueError, match=r"processor_kwargs\.sampling_rate is set; the model's processor accepts no arguments"
    ):
        loaded["qwen2_audio"][1].audio(make_sound(1.0), {"sampling_rate": 8000})


def test_a_family_takes_its_own_modalities(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="the model accepts no images"):
        loaded["qwen2_audio"][1].image(IMAGE, {})
    with pytest.raises(ValueError, match="the model accepts no audio"):
        loaded["llava"][1].audio(make_sound(1.0), {})
    with pytest.raises(ValueError, match="the model accepts no video"):
        loaded["llava"][1].video([IMAGE], [0.0], {})


def test_an_image_of_a_shape_that_makes_more_rows_than_there_may_be_is_refused(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="the image has 33 embeddings; this model's limit for an image is 16"):
        loaded["qwen2_vl"][1].image(make_image(640, 9), {})
