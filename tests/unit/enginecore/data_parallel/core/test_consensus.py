"""What ranks agree on is a function of their rows alone."""

from hypothesis import given
from hypothesis import strategies as st

from penstock_common.types.data_parallel import PauseMode, Pauses
from penstock_enginecore.data_parallel.core.rank import Row, agree

PAUSES = [Pauses(0), Pauses(1, PauseMode.WAIT), Pauses(1, PauseMode.KEEP), Pauses(2), Pauses(3, PauseMode.ABORT)]
ROWS = st.lists(
    st.builds(
        Row,
        epoch=st.just(4),
        wave=st.integers(0, 3),
        step=st.just(0),
        unfinished=st.booleans(),
        pauses=st.sampled_from(PAUSES),
        prepared=st.sampled_from([0, 5]),
    ),
    min_size=1,
    max_size=8,
)


@given(ROWS)
def test_the_newest_and_strongest_pause_is_that_of_all(rows):
    agreement = agree(rows)
    assert agreement.pauses == max(row.pauses for row in rows)
    assert agreement.wave == max(row.wave for row in rows)


@given(ROWS)
def test_nobody_steps_in_a_pause_unless_it_waits_for_work(rows):
    agreement = agree(rows)
    if agreement.pauses.on and agreement.pauses.mode is not PauseMode.WAIT:
        assert not agreement.run


@given(ROWS)
def test_an_epoch_begins_when_all_are_prepared_and_no_step_comes_before(rows):
    agreement = agree(rows)
    assert (agreement.switch_to == 5) == all(row.prepared == 5 for row in rows)
    assert not (agreement.switch_to and agreement.run)


@given(ROWS, st.randoms())
def test_the_order_of_ranks_decides_nothing(rows, random):
    shuffled = random.sample(rows, len(rows))
    assert agree(rows) == agree(shuffled)
