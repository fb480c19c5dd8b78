import hypothesis.strategies as st
from hypothesis import given

from penstock_common.types.data_parallel import PauseMode, Pauses
from penstock_enginecore.data_parallel.core.rank import Row, pack_row, unpack_row

numbers = st.integers(0, 2**64 - 1)
rows = st.builds(
    Row,
    numbers,
    numbers,
    numbers,
    st.booleans(),
    st.builds(Pauses, numbers, st.sampled_from(PauseMode)),
    numbers,
)


@given(rows)
def test_a_row_survives_the_exchange(row):
    assert unpack_row(pack_row(row)) == row


@given(rows, rows)
def test_all_rows_are_of_one_length(one, other):
    assert len(pack_row(one)) == len(pack_row(other))
