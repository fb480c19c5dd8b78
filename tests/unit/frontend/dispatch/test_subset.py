from collections import Counter

import msgspec
import pytest

from penstock_common.types.cluster import EngineState, EngineStatus
from penstock_frontend.dispatch.pool import Subset


def engines(count, **states):
    return [
        EngineStatus(
            engine_id=f"e{n}",
            incarnation="1",
            address=f"h:{n}",
            index=n,
            state=states.get(f"e{n}", EngineState.SERVING),
        )
        for n in range(count)
    ]


def ids(found):
    return {engine.engine_id for engine in found}


def test_few_engines_are_all_used_whatever_their_state():
    few = engines(3, e1=EngineState.DRAINING)
    assert Subset("f", 3).of(few) == few


def test_of_many_engines_a_frontend_keeps_to_its_own_and_comes_back_to_them():
    chosen = Subset("f", 10).of(engines(100))
    assert len(chosen) == 10
    assert ids(Subset("f", 10).of(list(reversed(engines(100))))) == ids(chosen)
    assert ids(Subset("g", 10).of(engines(100))) != ids(chosen)


def test_an_engine_that_leaves_changes_one_place():
    subset = Subset("f", 10)
    before = ids(subset.of(engines(100)))
    gone = min(before)
    after = ids(subset.of([e for e in engines(100) if e.engine_id != gone]))
    assert len(before - after) == len(after - before) == 1
    assert ids(subset.of(engines(100))) == before


@pytest.mark.parametrize("state", [EngineState.DRAINING, EngineState.WEDGED, EngineState.LOADING])
def test_an_engine_that_takes_no_requests_is_replaced(state):
    subset = Subset("f", 10)
    before = ids(subset.of(engines(100)))
    lost = min(before)
    after = ids(subset.of(engines(100, **{lost: state})))
    assert lost not in after
    assert len(after) == 10


def test_engines_that_take_no_requests_fill_the_places_that_are_left():
    many = [msgspec.structs.replace(e, state=EngineState.LOADING) for e in engines(20)]
    many[7] = msgspec.structs.replace(many[7], state=EngineState.SERVING)
    chosen = ids(Subset("f", 5).of(many))
    assert len(chosen) == 5
    assert "e7" in chosen


def test_every_engine_is_used_by_about_as_many_frontends():
    uses = Counter(e.engine_id for f in range(200) for e in Subset(f"frontend-{f}", 50).of(engines(200)))
    assert len(uses) == 200
    assert 20 < min(uses.values()) <= max(uses.values()) < 85  # 50 on average
