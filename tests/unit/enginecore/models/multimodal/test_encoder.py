"""The queue of items: order, budget, and failures that stay with the item that caused them."""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN

from penstock_common.types.media import TensorData
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.models.multimodal.base import EncodedItem, EncoderItem, MediaEncoder, to_data
from penstock_enginecore.models.multimodal.encoder import QuickGELU, TowerEncoder, use_quick_gelu
from tests.fakes.multimodal_items import image_tensors, item
from tests.fakes.multimodal_models import save_multimodal_model

COST = 16
"""Cost of a block: the number of embeddings of an image."""
BLOCKS = 2
WIDTH = 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_multimodal_model("llava", folder)
    return folder


@pytest.fixture(scope="module")
def loaded(directory: Path) -> MediaEncoder:
    encoder = load_model(
        ModelConfig(path=str(directory)), torch.device("cpu"), lambda line: None, with_towers=True
    ).encoder
    assert encoder is not None
    return encoder


@pytest.fixture
def encoder(loaded: MediaEncoder) -> Iterator[MediaEncoder]:
    yield loaded
    assert not loaded.has_work, "a test leaves work to the next"


@pytest.fixture(scope="module")
def image(directory: Path) -> Callable[[str], EncoderItem]:
    """Return a function that makes a different image for each identifier."""

    def make(identifier: str) -> EncoderItem:
        return item(image_tensors("llava", directory, seed=sum(identifier.encode())), 16, identifier=identifier)

    return make


def names(done: list[EncodedItem]) -> list[str]:
    return [each.identifier for each in done]


def finish(encoder: MediaEncoder) -> list[EncodedItem]:
    done = []
    while encoder.has_work:
        done += encoder.advance(10**6)
    return done


def test_a_block_is_computed_however_small_the_budget(encoder: MediaEncoder, image: Any) -> None:
    encoder.start(image("a"))
    assert encoder.advance(0) == []
    assert names(encoder.advance(0)) == ["a"]


def test_blocks_are_computed_as_far_as_the_budget_goes(encoder: MediaEncoder, image: Any) -> None:
    for name in "abc":
        encoder.start(image(name))
    assert names(encoder.advance(3 * COST)) == ["a"]  # and a block of the second
    assert names(encoder.advance(COST - 1)) == ["b"]
    assert names(encoder.advance(2 * COST - 1)) == []
    assert names(encoder.advance(2 * COST)) == ["c"]


def test_nothing_is_computed_without_an_item(encoder: MediaEncoder) -> None:
    assert not encoder.has_work
    assert encoder.advance(10**6) == []


def test_an_item_is_encoded_once_while_it_waits(encoder: MediaEncoder, image: Any) -> None:
    encoder.start(image("a"))
    encoder.start(image("a"))
    assert names(finish(encoder)) == ["a"]


@pytest.mark.parametrize("begun", [False, True])
def test_an_item_that_is_dropped_is_forgotten(encoder: MediaEncoder, image: Any, begun: bool) -> None:
    encoder.start(image("a"))
    encoder.start(image("b"))
    if begun:
        assert encoder.advance(0) == []
    encoder.drop("a")
    encoder.drop("nobody")
    assert names(encoder.advance(BLOCKS * COST)) == ["b"]


def test_an_item_that_was_dropped_may_come_again(encoder: MediaEncoder, image: Any) -> None:
    encoder.start(image("a"))
    (expected,) = finish(encoder)
    encoder.start(image("a"))
    encoder.advance(0)
    encoder.drop("a")
    encoder.start(image("a"))
    (again,) = finish(encoder)
    assert expected.rows is not None
    assert again.rows is not None
    assert torch.equal(again.rows, expected.rows)


def with_data(wanted: EncoderItem, **data: TensorData | None) -> EncoderItem:
    kept = {name: each for name, each in {**wanted.data, **data}.items() if each is not None}
    return EncoderItem(wanted.identifier, wanted.modality, wanted.num_embeds, kept)


FLOATS = torch.zeros(1, 3, 32, 32)
NAN = FLOATS.clone()
NAN[0, 1, 2, 3] = float("nan")
WRONG = [
    (None, "pixel_values is missing; this model needs pixel_values"),
    (to_data(FLOATS.double()), "pixel_values is float64; it must be uint8 or float32 or float16 or bfloat16"),
    (to_data(FLOATS[0]), "pixel_values has the shape [3, 32, 32]; it must be [1, 3, 32, 32]"),
    (to_data(FLOATS[..., :16]), "pixel_values has the shape [1, 3, 32, 16]; it must be [1, 3, 32, 32]"),
    (
        TensorData(dtype="uint8", shape=(1, 3, 32, 32), data=b"1"),
        "pixel_values has 1 bytes; its shape and dtype need 3072",
    ),
    (to_data(NAN), "pixel_values has numbers that are not finite, or beyond 65504"),
    (to_data(FLOATS + float("inf")), "pixel_values has numbers that are not finite, or beyond 65504"),
]


@pytest.mark.parametrize(("tensor", "said"), WRONG, ids=[said for _, said in WRONG])
def test_wrong_tensors_fail_their_item_alone(
    encoder: MediaEncoder, image: Any, tensor: TensorData | None, said: str
) -> None:
    encoder.start(image("a"))
    encoder.start(with_data(image("b"), pixel_values=tensor))
    encoder.start(image("c"))
    done = finish(encoder)
    assert [(each.identifier, each.failure, each.rows is None) for each in done] == [
        ("a", "", False),
        ("b", said, True),
        ("c", "", False),
    ]


def test_a_tensor_that_is_not_known_is_refused(encoder: MediaEncoder, image: Any) -> None:
    encoder.start(with_data(image("a"), weights=to_data(FLOATS)))
    (done,) = finish(encoder)
    assert done.failure == "unknown tensor 'weights'; this model accepts pixel_values"


def test_a_modality_that_the_model_does_not_take_is_refused(encoder: MediaEncoder, image: Any) -> None:
    encoder.start(EncoderItem("a", "audio", 16, image("a").data))
    (done,) = finish(encoder)
    assert done.failure == "the model accepts image, but not audio"


def test_a_number_of_rows_that_the_prompt_has_no_room_for_is_refused(encoder: MediaEncoder, image: Any) -> None:
    encoder.start(EncoderItem("a", "image", 17, image("a").data))
    (done,) = finish(encoder)
    assert done.failure == "the tensors give 16 embeddings, but the prompt has positions for 17"


@pytest.mark.parametrize("block", range(BLOCKS))
def test_an_encoders_error_fails_only_its_item(
    encoder: MediaEncoder, image: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(encoder, TowerEncoder)
    broken = encoder._family.blocks[block]
    forward = broken.forward
    monkeypatch.setattr(broken, "forward", lambda *args, **kwargs: 1 // 0)
    encoder.start(image("a"))
    (done,) = finish(encoder)
    assert done.failure == "the model's media encoder failed: ZeroDivisionError: integer division or modulo by zero"
    monkeypatch.setattr(broken, "forward", forward)
    encoder.start(image("a"))
    (done,) = finish(encoder)
    assert done.failure == ""


def test_device_errors_are_not_blamed_on_an_item(
    encoder: MediaEncoder, image: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(encoder, TowerEncoder)

    def fail(*args: object, **kwargs: object) -> None:
        raise torch.AcceleratorError("unspecified launch failure")

    monkeypatch.setattr(encoder._family.blocks[0], "forward", fail)
    encoder.start(image("a"))
    with pytest.raises(torch.AcceleratorError):
        encoder.advance(0)
    encoder.drop("a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_that_are_given_are_taken_as_they_are(encoder: MediaEncoder, dtype: torch.dtype) -> None:
    given = torch.arange(5 * WIDTH, dtype=torch.float32).view(5, WIDTH).to(dtype)
    encoder.start(item({"embeds": given}, 5))
    (done,) = encoder.advance(0)
    assert done.rows is not None
    assert torch.equal(done.rows, given.float())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.zeros(4, WIDTH), "embeds has the shape [4, 64]; it must be [5, 64]"),
        (torch.zeros(5, WIDTH - 1), "embeds has the shape [5, 63]; it must be [5, 64]"),
        (torch.zeros(5, WIDTH, dtype=torch.int32), "embeds is int32; it must be float32 or float16 or bfloat16"),
        (torch.full((5, WIDTH), float("inf")), "embeds has numbers that are not finite, or beyond 65504"),
    ],
)
def test_rows_that_are_given_are_looked_at(encoder: MediaEncoder, given: torch.Tensor, said: str) -> None:
    encoder.start(item({"embeds": given}, 5))
    (done,) = encoder.advance(0)
    assert done.failure == said


def test_rows_that_are_given_cost_nothing(encoder: MediaEncoder, image: Any) -> None:
    encoder.start(item({"embeds": torch.zeros(5, WIDTH)}, 5, identifier="given"))
    encoder.start(image("a"))
    assert names(encoder.advance(BLOCKS * COST)) == ["given", "a"]


def test_a_slice_leaves_torchs_modes_as_they_were(encoder: MediaEncoder, image: Any) -> None:
    encoder.start(image("a"))
    with torch.enable_grad():
        encoder.advance(0)
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    with torch.inference_mode():
        encoder.advance(0)
        assert torch.is_inference_mode_enabled()


def test_a_slice_has_a_context_of_its_own(encoder: MediaEncoder, image: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that is paused inside a changed context does not change the context of the next computation."""
    assert isinstance(encoder, TowerEncoder)
    variable = ContextVar("variable", default="outside")
    tower = encoder._family.towers.vision_tower
    forward = tower.forward

    def changed(*args: object, **kwargs: object) -> Any:
        token = variable.set("in the tower")
        try:
            return forward(*args, **kwargs)
        finally:
            assert variable.get() == "in the tower"
            variable.reset(token)

    monkeypatch.setattr(tower, "forward", changed)
    encoder.start(image("a"))
    assert encoder.advance(0) == []
    assert variable.get() == "outside"
    (done,) = encoder.advance(0)
    assert done.failure == ""
    assert variable.get() == "outside"


def test_what_an_item_came_in_may_be_overwritten_behind_its_first_slice(encoder: MediaEncoder, image: Any) -> None:
    encoder.start(image("a"))
    (expected,) = finish(encoder)
    wanted = image("a")
    pixels = wanted.data["pixel_values"]
    memory = bytearray(pixels.data)
    encoder.start(with_data(wanted, pixel_values=TensorData(pixels.dtype, pixels.shape, memory)))
    encoder.advance(0)
    memory[:] = bytes(len(memory))
    (found,) = finish(encoder)
    assert found.rows is not None
    assert expected.rows is not None
    assert torch.equal(found.rows, expected.rows)


# The vision encoders' quick GELU.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_those_of_transformers(dtype: torch.dtype) -> None:
    x = (torch.randn(37, 61, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)
    before = x.clone()
    assert torch.equal(QuickGELU()(x), ACT2FN["quick_gelu"](x))
    assert torch.equal(x, before)


def test_only_modules_of_its_kind_are_replaced() -> None:
    inner = torch.nn.ModuleDict({"quick": ACT2FN["quick_gelu"], "other": ACT2FN["gelu"]})
    tower = torch.nn.ModuleDict({"inner": inner, "outer": ACT2FN["quick_gelu"]})
    use_quick_gelu(tower)
    assert type(inner["quick"]) is type(tower["outer"]) is QuickGELU
    assert type(inner["other"]) is type(ACT2FN["gelu"])
