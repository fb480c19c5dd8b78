"""Positions of embeddings in a request."""

from penstock_common.types.media import EmbedRun
from penstock_enginecore.core.request import embeds_from, embeds_span, first_embed, joined_runs, span_around
from tests.fakes.engines.fake_encoder import embed_positions, make_feature

WHOLE = make_feature(1, 10, 4)
RUNS = make_feature(2, 20, 8, embed_runs=(EmbedRun(1, 2), EmbedRun(5, 2)))


def test_the_first_embedding_from_a_position_on():
    for feature in (WHOLE, RUNS):
        positions = list(embed_positions(feature))
        for start in range(40):
            expected = min((position for position in positions if position >= start), default=None)
            assert first_embed(feature, start) == expected


def test_a_span_goes_from_the_first_embedding_to_the_last():
    assert embeds_span(WHOLE) == (10, 14)
    assert embeds_span(RUNS) == (21, 27)


def test_adjacent_runs_of_embeddings_are_one_range():
    runs = (EmbedRun(0, 2), EmbedRun(2, 3), EmbedRun(6, 1))
    assert joined_runs(make_feature(3, 20, 7, embed_runs=runs)) == [(20, 25), (26, 27)]
    assert joined_runs(WHOLE) == [(10, 14)]


def test_features_without_embeddings_from_a_position_on_are_passed_over():
    assert list(embeds_from([WHOLE, RUNS], 0)) == [(0, 10), (1, 21)]
    assert list(embeds_from([WHOLE, RUNS], 13)) == [(0, 13), (1, 21)]
    assert list(embeds_from([WHOLE, RUNS], 14)) == [(1, 21)]
    assert list(embeds_from([WHOLE, RUNS], 27)) == []


def test_a_cut_parts_a_span_that_begins_before_it_and_ends_behind():
    spans = [(2, 5), (5, 9)]
    assert [span_around(spans, cut) for cut in range(11)] == [
        None, None, None, (2, 5), (2, 5), None, (5, 9), (5, 9), (5, 9), None, None,
    ]  # fmt: skip
