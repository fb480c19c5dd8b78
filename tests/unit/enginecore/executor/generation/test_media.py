"""Rows of media in a worker: computed in slices when the engine says so, kept until it says otherwise."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from penstock_common.types.media import EMBEDS, EmbedRun, MultiModalFeature, TensorData
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.scheduler.output import EncoderStart, NewRequestData, SchedulerOutput
from penstock_enginecore.executor.generation.media import EncoderRows, MediaPrompts, Placed, row_bytes
from penstock_enginecore.models.multimodal.base import RopePositions
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
    with pytest.raises(RuntimeError, match="the embeddings of media item a do not exist"):
        rows.of("a")


@pytest.mark.parametrize(
    ("identifier", "data", "failure"),
    [
        ("bad", PIXELS, "it is bad"),
        ("short", PIXELS, r"the model returned shape \[3, 6\], the prompt needs \[4, 6\]"),
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
    assert told == {"b": "ValueError: tensor 'embeds' is float32 [6, 4], but the prompt needs floats of shape [4, 6]"}


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


# Where media of requests are in the flat batch of a step.

ROWS_OF_THREE = (EmbedRun(0, 3), EmbedRun(4, 3))
"""Two rows of a picture, with a token after each."""


def feature(identifier: str, offset: int, length: int, runs: tuple[EmbedRun, ...] = ()) -> MultiModalFeature:
    return MultiModalFeature(modality="image", identifier=identifier, offset=offset, length=length, embed_runs=runs)


def new(request_id: str, num_tokens: int, *features: MultiModalFeature, computed: int = 0) -> NewRequestData:
    return NewRequestData(
        request_id=request_id,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=computed,
        block_ids=([1],),
        sampling_params=SamplingParams(),
        mm_features=list(features),
    )


def placed(**chunks: tuple[int, int]) -> Placed:
    """Return the placement. ``chunks`` maps a request to the first and the last position to compute."""
    starts = np.cumsum([0, *(end - first for first, end in chunks.values())])
    return Placed(list(chunks), starts, np.concatenate([np.arange(first, end) for first, end in chunks.values()]))


def prompts(encoder: FakeMediaEncoder | None = None) -> MediaPrompts:
    made = MediaPrompts(encoder or FakeMediaEncoder(4))
    two = (feature("a", 2, 8, ROWS_OF_THREE), feature("b", 10, 4))
    made.update(SchedulerOutput(new_requests=[new("x", 16, *two), new("text", 9), new("y", 5, feature("a", 1, 3))]))
    return made


def test_rows_are_found_in_chunks_that_begin_and_end_anywhere() -> None:
    made = prompts()
    for first in range(16):
        for end in range(first + 1, 17):
            found = {}
            for rows in made.rows(placed(text=(0, 9), x=(first, end))):
                assert len(rows.indices) == rows.end - rows.start > 0
                for index, row in zip(rows.indices.tolist(), range(rows.start, rows.end), strict=True):
                    found[index - 9 + first] = (rows.identifier, row)
            whole = dict(zip((2, 3, 4, 6, 7, 8), (("a", i) for i in range(6)), strict=True))
            whole |= {10 + i: ("b", i) for i in range(4)}
            assert found == {position: row for position, row in whole.items() if first <= position < end}


def test_requests_that_are_gone_or_are_text_cost_nothing() -> None:
    made = prompts()
    assert made.rows(placed(text=(0, 9))) == []
    assert len(made) == 2
    made.update(SchedulerOutput(finished_request_ids=["x", "text"], preempted_request_ids=["y"]))
    assert len(made) == 0
    made.update(SchedulerOutput(new_requests=[new("y", 7, feature("a", 1, 3), computed=2)]))
    (rows,) = made.rows(placed(y=(2, 7)))
    assert (rows.start, rows.end, rows.indices.tolist()) == (1, 3, [0, 1])


def test_positions_with_sections_go_on_behind_the_prompt() -> None:
    made = prompts(FakeMediaEncoder(4, has_sections=True))
    assert made.rope_positions(placed(text=(3, 9))) is None
    found = made.rope_positions(placed(text=(3, 5), y=(0, 5), x=(16, 18)))
    assert found is not None
    assert found.tolist() == [
        [3, 4, 0, 1, 1, 1, 2, 12, 13],
        [3, 4, 0, 1, 2, 3, 2, 12, 13],
        [3, 4, 0, 1, 1, 1, 2, 12, 13],
    ]
    across = made.rope_positions(placed(y=(3, 8)))
    assert across is not None
    assert across.tolist() == [[1, 2, 3, 4, 5], [3, 2, 3, 4, 5], [1, 2, 3, 4, 5]]


def test_models_without_sections_have_plain_positions() -> None:
    assert prompts().rope_positions(placed(x=(0, 16))) is None


def test_embeddings_of_a_run_see_each_other_and_tokens_between_do_not() -> None:
    made = prompts(FakeMediaEncoder(4, both_ways=True))
    found = made.key_ends(placed(text=(0, 2), x=(0, 16)))
    assert found is not None
    assert found[:2].tolist() == [1, 2]
    assert found[2:].tolist() == [1, 2, 5, 5, 5, 6, 9, 9, 9, 10, 14, 14, 14, 14, 15, 16]
    assert made.key_ends(placed(x=(14, 16), text=(0, 9))) is None
    assert prompts().key_ends(placed(x=(0, 16))) is None


def test_runs_side_by_side_are_one_and_items_side_by_side_are_not() -> None:
    made = MediaPrompts(FakeMediaEncoder(4, both_ways=True))
    split = feature("a", 1, 4, (EmbedRun(0, 2), EmbedRun(2, 2)))
    made.update(SchedulerOutput(new_requests=[new("x", 8, split, feature("b", 5, 2))]))
    found = made.key_ends(placed(x=(0, 8)))
    assert found is not None
    assert found.tolist() == [1, 5, 5, 5, 5, 7, 7, 8]


def test_a_step_that_cuts_what_sees_each_other_is_an_error() -> None:
    made = prompts(FakeMediaEncoder(4, both_ways=True))
    with pytest.raises(
        RuntimeError, match="ends at position 12 of a prompt, inside a group of embeddings .* end at position 14"
    ):
        made.key_ends(placed(x=(9, 12)))


def test_an_item_that_does_not_fit_where_it_stands_fails_alone() -> None:
    class Encoder(FakeMediaEncoder):
        def _rope_positions(self, token_ids: Sequence[int], features: Sequence[MultiModalFeature]) -> RopePositions:
            if features[0].length != 4:
                raise ValueError(f"{features[0].length} positions are not 4")
            return RopePositions(np.zeros((3, len(token_ids)), np.int64), 0)

    made = MediaPrompts(Encoder(4, has_sections=True))
    step = SchedulerOutput(new_requests=[new("x", 9, feature("a", 1, 5)), new("y", 9, feature("b", 1, 4))])
    assert made.update(step) == {"a": "5 positions are not 4"}
    assert len(made) == 2
