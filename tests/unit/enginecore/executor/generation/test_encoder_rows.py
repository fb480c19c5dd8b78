"""Rows of media in a worker: computed in slices when the engine says so, kept until it says otherwise."""

import pytest
import torch

from penstock_common.types.media import EMBEDS, TensorData
from penstock_enginecore.core.scheduler.output import EncoderStart, SchedulerOutput
from penstock_enginecore.executor.generation.media import EncoderRows, row_bytes
from tests.fakes.models.fake_media_encoder import NUM_BLOCKS, FakeMediaEncoder, rows_of

PIXELS = {"pixel_values": TensorData(dtype="uint8", shape=(1, 2), data=b"ab")}
WIDTH = 6


def start(identifier: str, num_embeds: int = 4, data: dict[str, TensorData] = PIXELS) -> EncoderStart:
    return EncoderStart(identifier=identifier, modality="image", num_embeds=num_embeds, data=data)


def work(*starts: EncoderStart, budget: int = 0, freed: tuple[str, ...] = ()) -> SchedulerOutput:
    return SchedulerOutput(encoder_starts=list(starts), encoder_budget=budget, freed_identifiers=list(freed))


@pytest.fixture
def encoder() -> FakeMediaEncoder:
    return FakeMediaEncoder(WIDTH)


@pytest.fixture
def rows(encoder: FakeMediaEncoder) -> EncoderRows:
    return EncoderRows(encoder, torch.float32, torch.device("cpu"))


def test_items_are_computed_in_their_order_by_slices_and_kept(rows: EncoderRows) -> None:
    assert rows.update(work(start("a"), start("b", 3), budget=8)) == {}
    assert len(rows) == 0
    assert rows.update(work(budget=8)) == {}
    assert len(rows) == 1
    assert torch.equal(rows.of("a"), rows_of("a", 4, WIDTH))
    rows.update(work(budget=3 * NUM_BLOCKS))
    assert torch.equal(rows.of("b"), rows_of("b", 3, WIDTH))
    assert rows.num_bytes == 7 * WIDTH * 4 == 7 * row_bytes(FakeMediaEncoder(WIDTH), torch.float32)


def test_a_step_without_a_budget_computes_nothing(rows: EncoderRows, encoder: FakeMediaEncoder) -> None:
    rows.update(work(start("a")))
    rows.update(work(start("b")))
    assert encoder.num_slices == 0
    rows.update(work(budget=1))
    assert encoder.num_slices == 1


def test_what_is_freed_is_forgotten_before_anything_else(rows: EncoderRows, encoder: FakeMediaEncoder) -> None:
    rows.update(work(start("a"), start("b"), budget=5))
    rows.update(work(start("a"), budget=1000, freed=("a", "unknown")))
    assert [item.identifier for item, _ in encoder.queue] == []
    assert torch.equal(rows.of("a"), rows_of("a", 4, WIDTH))
    rows.update(work(freed=("a", "b")))
    assert len(rows) == 0
    with pytest.raises(RuntimeError, match="the embeddings of a are not there"):
        rows.of("a")


@pytest.mark.parametrize(
    ("identifier", "data", "failure"),
    [
        ("bad", PIXELS, "it is bad"),
        ("short", PIXELS, r"the model gave embeddings \[3, 6\] where the prompt has \[4, 6\]"),
        ("empty", {}, "ValueError: there is no data"),
    ],
)
def test_an_item_that_fails_is_told_of_once_and_has_rows_of_zeros(
    rows: EncoderRows, identifier: str, data: dict[str, TensorData], failure: str
) -> None:
    told = rows.update(work(start(identifier, data=data), start("good"), budget=1000))
    assert list(told) == [identifier]
    with pytest.raises(AssertionError, match=failure):
        raise AssertionError(told[identifier])
    assert torch.equal(rows.of(identifier), torch.zeros(4, WIDTH))
    assert torch.equal(rows.of("good"), rows_of("good", 4, WIDTH))
    assert rows.update(work(budget=1000)) == {}
    assert rows.update(work(start(identifier), budget=0, freed=(identifier,))) == {}


def test_embeddings_that_a_request_brought_are_there_at_once(rows: EncoderRows, encoder: FakeMediaEncoder) -> None:
    given = torch.randn(4, WIDTH)
    tensor = TensorData(dtype="float32", shape=(1, 4, WIDTH), data=given.numpy().tobytes())
    assert rows.update(work(start("before"), start("a", data={EMBEDS: tensor}))) == {}
    assert torch.equal(rows.of("a"), given)
    assert encoder.num_slices == 0
    wrong = TensorData(dtype="float32", shape=(6, 4), data=given.numpy().tobytes())
    told = rows.update(work(start("b", data={EMBEDS: wrong})))
    assert told == {"b": "ValueError: 'embeds' is float32 [6, 4]; the prompt has place for [4, 6], floats"}


def test_everything_is_forgotten_at_once(rows: EncoderRows, encoder: FakeMediaEncoder) -> None:
    rows.update(work(start("a"), start("b"), budget=17))
    rows.forget_all()
    assert (len(rows), encoder.has_work) == (0, False)
    assert rows.update(work(start("a"), budget=1000)) == {}


def test_the_largest_item_is_paused_while_a_step_is_profiled(rows: EncoderRows, encoder: FakeMediaEncoder) -> None:
    paused = []
    rows.profile(lambda: paused.append([(item.num_embeds, blocks) for item, blocks in encoder.queue]))
    assert paused == [[(8, 1)]]
    assert not encoder.has_work
    assert len(rows) == 0
