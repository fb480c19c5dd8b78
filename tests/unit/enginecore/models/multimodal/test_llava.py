"""LLaVA can use the hidden states of any of its encoder's layers, and computes no later layers."""

from pathlib import Path

import pytest
import torch

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.loader import load_model
from tests.fakes.multimodal_items import features, image_tensors, item
from tests.fakes.multimodal_models import save_multimodal_model


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["llava", "llava_siglip", "llava_pixtral"])
@pytest.mark.parametrize("layers", [1, 2, -1, -2, -3, [0, 1], [-1, 0], [1, -2]])
def test_states_of_any_block_make_the_rows(tmp_path: Path, family: str, layers: int | list[int]) -> None:
    oracle = save_multimodal_model(family, tmp_path, vision_feature_layer=layers)
    loaded = load_model(ModelConfig(path=str(tmp_path)), torch.device("cpu"), lambda line: None, with_towers=True)
    assert loaded.encoder is not None
    expected = features(oracle, "image", image_tensors(family, tmp_path, raw=False))
    loaded.encoder.start(item(image_tensors(family, tmp_path), len(expected)))
    total = 3 if family == "llava" else 2
    last = max(layer % (total + 1) for layer in (layers if isinstance(layers, list) else [layers]))
    (info,) = loaded.encoder.media
    assert info.num_blocks == max(last, 1)
    for _ in range(info.num_blocks - 1):
        assert loaded.encoder.advance(0) == []
    (done,) = loaded.encoder.advance(0)
    assert done.rows is not None, done.failure
    assert torch.equal(done.rows, expected)
