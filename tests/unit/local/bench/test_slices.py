"""A run in slices."""

from array import array

from penstock_local.bench.report import Record, cut


def test_tokens_are_counted_where_they_came_and_requests_where_they_ran() -> None:
    records = [
        Record(start=0.0, end=2.0, times=array("d", [0.5, 1.5]), sizes=array("l", [1, 3])),
        Record(start=1.0, end=4.0, times=array("d", [4.0]), sizes=array("l", [2])),
        Record(start=0.6, end=1.4),
    ]
    slices = cut(records, 4.0, 4)
    assert (slices.width, slices.middles) == (1.0, [0.5, 1.5, 2.5, 3.5])
    assert slices.tokens_per_s == [1.0, 3.0, 0.0, 2.0]
    assert slices.running == [1, 2, 1, 1]
