import pytest

from penstock_coordinator.view_channel import Pace

PACE = Pace(view_interval=0.1, max_reports_per_second=2000.0)


@pytest.mark.parametrize("num_engines", [1, 19, 20, 21, 100, 999, 1000, 4000, 20_000])
def test_a_pool_never_reports_more_often_than_it_may(num_engines):
    interval = max(PACE.of_reports(num_engines), 0.01)
    assert num_engines / interval <= 2000.0 * (1 + 1e-6)
    assert interval <= max(num_engines / 2000.0 * 1.25, 0.01) * (1 + 1e-6)


def test_engines_of_a_small_pool_report_as_they_like():
    assert PACE.of_reports(0) == PACE.of_reports(19) == 0.0


def test_a_pool_that_grows_to_a_thousand_is_told_few_intervals():
    assert len({PACE.of_reports(n) for n in range(1001)}) < 25


def test_views_of_many_engines_come_as_often_as_their_reports():
    assert PACE.of_views(10) == PACE.of_views(200) == 0.1
    assert PACE.of_views(1000) == 0.5
    assert PACE.of_views(4000) == 2.0


def test_changes_of_few_members_are_told_at_once_and_of_many_within_a_tenth_of_a_second():
    assert PACE.of_changes(1) <= 0.0001
    assert PACE.of_changes(1000) == pytest.approx(0.05)
    assert PACE.of_changes(100_000) == 0.1
