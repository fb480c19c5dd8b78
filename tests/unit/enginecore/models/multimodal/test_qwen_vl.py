"""Positions in time, height and width are those of transformers, for Qwen's and GLM's models."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from penstock_common.types.media import EmbedRun, MultiModalFeature, TensorData
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.models.multimodal.base import MediaEncoder, RopePositions, to_data
from tests.fakes.multimodal_models import save_multimodal_model

GLM = ("glm4v", "glm_ocr")
"""Model types with tokens around images."""
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", *GLM)
TIMED = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", *GLM)
TEXT, TIME = 7, 9
SECONDS = "second_per_grid_ts"


class Model(NamedTuple):
    family: str
    oracle: PreTrainedModel
    encoder: MediaEncoder


class Part(NamedTuple):
    """A text of ``tokens`` tokens, or a grid of embeddings if ``tokens`` is 0. An image has 0 ``frames``."""

    tokens: int = 0
    frames: int = 0
    height: int = 1
    width: int = 1
    seconds: float = 1.0


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp(request.param)
    oracle = save_multimodal_model(request.param, directory)
    loaded = load_model(ModelConfig(path=str(directory)), torch.device("cpu"), lambda line: None, with_towers=True)
    assert loaded.encoder is not None
    return Model(request.param, oracle, loaded.encoder)


def prompt(model: Model, parts: Sequence[Part]) -> tuple[list[int], list[MultiModalFeature]]:
    """Return tokens and features as a frontend makes them."""
    config: Any = model.oracle.config
    kind = "image" if model.family in GLM else "vision"
    begin, end = (getattr(config, f"{kind}_{edge}_token_id") for edge in ("start", "end"))
    tokens: list[int] = []
    features: list[MultiModalFeature] = []
    for number, part in enumerate(parts):
        if part.tokens:
            tokens += [TEXT] * part.tokens
            continue
        offset, per_frame = len(tokens), part.height * part.width
        pad = config.video_token_id if part.frames else config.image_token_id
        runs: tuple[EmbedRun, ...] = ()
        if part.frames and model.family in TIMED:
            for _ in range(part.frames):
                tokens += [TIME, TIME, begin]
                runs += (EmbedRun(len(tokens) - offset, per_frame),)
                tokens += [pad] * per_frame + [end]
        else:
            tokens += [pad] * (per_frame * max(part.frames, 1))
        grid = torch.tensor([[max(part.frames, 1), 2 * part.height, 2 * part.width]])
        data: dict[str, TensorData] = {"video_grid_thw" if part.frames else "image_grid_thw": to_data(grid)}
        if part.frames and model.family not in TIMED:
            data[SECONDS] = to_data(torch.tensor([part.seconds]))
        features.append(
            MultiModalFeature(
                modality="video" if part.frames else "image",
                identifier=f"{number:064x}",
                offset=offset,
                length=len(tokens) - offset,
                embed_runs=runs,
                data=data,
            )
        )
    return tokens, features


def of_transformers(model: Model, tokens: list[int], parts: Sequence[Part]) -> RopePositions:
    """Return the positions that the model's ``get_rope_index`` computes. Its delta is not used, as in ``generate``: it
    would put outputs after the last frame.
    """
    oracle: Any = model.oracle
    config, base = oracle.config, oracle.model
    kinds = {config.image_token_id: 1, config.video_token_id: 2}
    arguments: dict[str, Any] = {}
    for name, chosen in (
        ("image_grid_thw", [part for part in parts if not part.tokens and not part.frames]),
        ("video_grid_thw", [part for part in parts if part.frames]),
    ):
        if chosen:
            arguments[name] = torch.tensor([[max(p.frames, 1), 2 * p.height, 2 * p.width] for p in chosen])
    if model.family == "qwen2_5_vl":
        arguments[SECONDS] = torch.tensor([part.seconds for part in parts if part.frames])
    text = next(token for token in range(len(kinds) + 1) if token not in kinds)
    longer = [*tokens, text]
    positions, _ = base.get_rope_index(
        torch.tensor([longer]), mm_token_type_ids=torch.tensor([[kinds.get(t, 0) for t in longer]]), **arguments
    )
    return RopePositions(positions[:, 0, :-1].numpy(), int(positions[0, 0, -1]) - len(tokens))


texts = st.integers(1, 6).map(Part)
grids = st.tuples(
    st.just(0), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0.1, 0.5, 1.0, 1.3, 2.0])
).map(Part._make)


@given(items=st.lists(st.tuples(texts, grids), max_size=5), last=st.integers(0, 4))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_positions_are_those_of_transformers(model: Model, items: list[tuple[Part, Part]], last: int) -> None:
    parts = [part for pair in items for part in pair] + [Part(tokens=last)] * bool(last)
    if not parts:
        parts = [Part(tokens=1)]
    tokens, features = prompt(model, parts)
    expected = of_transformers(model, tokens, parts)
    found = model.encoder.rope_positions(tokens, features)
    np.testing.assert_array_equal(found.positions, expected.positions)
    assert found.positions.dtype == np.int64
    assert found.delta == expected.delta


Piece = tuple[str, int, int]
"""Kind of a piece of a prompt, and its sizes: text of so many tokens, an image of so many embeddings in height and width,
or sound of so many time steps.
"""
PROMPTS: list[list[Piece]] = [
    [("text", 3, 0), ("image", 2, 3), ("text", 2, 0), ("image", 4, 1), ("text", 1, 0), ("image", 1, 1)],
    [("image", 1, 5), ("audio", 130, 0), ("text", 4, 0), ("image", 3, 2), ("text", 6, 0)],
    [("audio", 100, 0), ("text", 1, 0), ("image", 2, 2), ("audio", 7, 0), ("audio", 260, 0)],
]


def prompt_of(
    config: Any, pieces: Sequence[Piece], rows_of: Callable[[int], int]
) -> tuple[list[int], list[MultiModalFeature], dict[str, list[Any]]]:
    """Return the tokens of a prompt, its features, and the sizes of its items by modality."""
    tokens: list[int] = []
    features: list[MultiModalFeature] = []
    sizes: dict[str, list[Any]] = {"image": [], "audio": []}
    for number, (kind, first, second) in enumerate(pieces):
        if kind == "text":
            tokens += [TEXT] * first
            continue
        edges = "vision" if kind == "image" else "audio"
        count = first * second if kind == "image" else rows_of(first)
        tokens.append(getattr(config, f"{edges}_start_token_id"))
        grid = [1, 2 * first, 2 * second]
        features.append(
            MultiModalFeature(
                modality="image" if kind == "image" else "audio",
                identifier=f"{number:064x}",
                offset=len(tokens),
                length=count,
                data={"image_grid_thw": to_data(torch.tensor([grid]))} if kind == "image" else {},
            )
        )
        tokens += [getattr(config, f"{kind}_token_id")] * count + [TIME]
        sizes[kind].append(grid if kind == "image" else first)
    return tokens, features, sizes


@pytest.mark.parametrize("pieces", PROMPTS)
@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe", "paddleocr_vl"])
def test_positions_of_images_beside_sound_are_those_of_transformers(
    family: str, pieces: list[Piece], tmp_path: Path
) -> None:
    if family == "paddleocr_vl":
        pieces = [piece for piece in pieces if piece[0] != "audio"]
    oracle: Any = save_multimodal_model(family, tmp_path)
    encoder: Any = load_model(
        ModelConfig(path=str(tmp_path)), torch.device("cpu"), lambda line: None, with_towers=True
    ).encoder
    sounds = encoder._family.by_modality.get("audio")
    tokens, features, sizes = prompt_of(oracle.config, pieces, lambda steps: sounds.rows(steps))
    ids = torch.tensor([[*tokens, TEXT]])
    given: dict[str, Any] = {
        "image_grid_thw": torch.tensor(sizes["image"]),
        "attention_mask": torch.ones_like(ids),
    }
    if family == "paddleocr_vl":
        given["mm_token_type_ids"] = (ids == oracle.config.image_token_id).int()
        expected, _ = oracle.model.get_rope_index(ids, **given)
    else:
        expected, _ = oracle.get_rope_index(ids, audio_seqlens=torch.tensor(sizes["audio"]), **given)
    found = encoder.rope_positions(tokens, features)
    np.testing.assert_array_equal(found.positions, expected[:, 0, :-1].numpy())
    assert found.delta == int(expected[0, 0, -1]) - len(tokens)


def test_images_that_stand_side_by_side_are_two(model: Model) -> None:
    """transformers would treat them as one image."""
    apart = [Part(tokens=2), Part(height=2, width=3), Part(tokens=1), Part(height=2, width=1), Part(tokens=2)]
    together = [part for part in apart if part != Part(tokens=1)]
    tokens, features = prompt(model, together)
    found = model.encoder.rope_positions(tokens, features)
    expected = model.encoder.rope_positions(*prompt(model, apart)).positions
    expected = np.delete(expected, 2 + 6, axis=1)  # the token between them
    expected[:, 2 + 6 :] -= 1
    np.testing.assert_array_equal(found.positions, expected)


def test_a_grid_that_does_not_fill_its_positions_is_refused(model: Model) -> None:
    tokens, features = prompt(model, [Part(height=2, width=3)])
    wrong = MultiModalFeature(modality="image", identifier="0" * 64, offset=0, length=5, data=features[0].data)
    with pytest.raises(ValueError, match="a grid has 6 embeddings, but the prompt has 5 positions"):
        model.encoder.rope_positions(tokens, [wrong])


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({}, "image_grid_thw is missing"),
        ({"image_grid_thw": TensorData("int64", (1, 3), np.array([-1, -4, 4]).tobytes())}, "must be at least 1"),
        ({"image_grid_thw": TensorData("int64", (3,), bytes(24))}, "has the shape"),
        ({"image_grid_thw": TensorData("float32", (1, 3), bytes(12))}, "is float32"),
        ({"image_grid_thw": TensorData("int64", (1, 3), bytes(23))}, "has 23 bytes"),
    ],
)
def test_positions_are_not_made_of_what_is_no_grid(model: Model, tensors: dict[str, TensorData], why: str) -> None:
    wrong = MultiModalFeature(modality="image", identifier="0" * 64, offset=0, length=4, data=tensors)
    with pytest.raises(ValueError, match=why):
        model.encoder.rope_positions([1] * 9, [wrong])


def test_positions_have_sections_and_rows_are_as_wide_as_deepstack_wants(model: Model) -> None:
    assert model.encoder.rope_positions is not None
    assert model.encoder.num_deepstack == (2 if model.family.startswith("qwen3_vl") else 0)
    assert model.encoder.width == 64 * (1 + model.encoder.num_deepstack)


def test_other_families_have_one_position_a_token(tmp_path: Path) -> None:
    save_multimodal_model("llava", tmp_path)
    loaded = load_model(ModelConfig(path=str(tmp_path)), torch.device("cpu"), lambda line: None, with_towers=True)
    assert loaded.encoder is not None
    assert loaded.encoder.rope_positions is None
