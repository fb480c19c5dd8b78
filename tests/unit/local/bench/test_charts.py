"""Charts: where values lie, and which ticks an axis has."""

import pytest

from penstock_local.bench.html_report import axis, bars, line, mark, number, steps


@pytest.mark.parametrize(
    ("largest", "options", "end", "ticks"),
    [
        (10.0, {}, 10.0, [0, 2, 4, 6, 8, 10]),
        (11.0, {"round_up": True}, 15.0, [0, 5, 10, 15]),
        (0.07, {"ticks": 4}, 0.07, [0, 0.02, 0.04, 0.06]),
        (2.0, {"whole": True}, 2.0, [0, 1, 2]),
        (0.0, {"whole": True, "round_up": True}, 1.0, [0, 1]),
    ],
)
def test_ticks_are_round(largest: float, options: dict[str, bool], end: float, ticks: list[float]) -> None:
    found = axis(largest, "ms", **options)
    assert (found.end, found.ticks) == (pytest.approx(end), pytest.approx(ticks))


def test_marks_lie_where_their_values_are() -> None:
    x, y = axis(10.0, "s"), axis(4.0, "n")
    assert 'points="0,1000 500,0 1000,500"' in line("a", x, y, [(0, 0), (5, 4), (10, 2)])
    assert 'd="M0,1000 L0,750 L500,750 L500,0 L1000,0 L1000,1000"' in steps("a", x, y, 5.0, [1, 4])
    assert 'd="M100,500 H400 M0,0 H1000"' in bars("a", x, y, [(1, 4, 2), (0, 99, 4)], pixels=3)
    assert 'd="M250,0 V1000"' in mark("a", x, 2.5)


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0.0, 0.25, 2.0, 7.125, 12000.0)] == ["0", "0.25", "2", "7.12", "12,000"]
