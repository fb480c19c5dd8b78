"""Where an engine has blocks, against sets of them for each medium."""

from hypothesis import given
from hypothesis import strategies as st

from penstock_common.types.kv_transfer import KvMedium
from penstock_frontend.dispatch.prefix_caches import BlockPlaces

BLOCKS = [bytes([number]) for number in range(4)]


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from(KvMedium),
            st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4, unique=True),
        ),
        max_size=30,
    )
)
def test_a_block_is_nowhere_once_it_has_left_every_medium(changes: list[tuple[bool, KvMedium, list[bytes]]]) -> None:
    places, held = BlockPlaces(), {medium: set[bytes]() for medium in KvMedium}
    found: set[bytes] = set()
    for stored, medium, blocks in changes:
        if stored:
            places.stored(medium, blocks, found.__contains__)
            found.update(blocks)
            held[medium].update(blocks)
        else:
            found.difference_update(places.removed(medium, blocks))
            held[medium].difference_update(blocks)
        assert found == set().union(*held.values())
    assert set(places._media) == set().union(
        *(blocks for medium, blocks in held.items() if medium is not KvMedium.DEVICE)
    )


def test_nothing_is_kept_of_engines_that_have_blocks_in_their_kv_cache_alone() -> None:
    places = BlockPlaces()
    places.stored(KvMedium.DEVICE, BLOCKS, lambda _: False)
    assert not places._media
    assert places.removed(KvMedium.DEVICE, BLOCKS) == BLOCKS
    places.stored(KvMedium.HOST, BLOCKS, lambda _: False)
    places.clear()
    assert places.removed(KvMedium.HOST, BLOCKS) == []
