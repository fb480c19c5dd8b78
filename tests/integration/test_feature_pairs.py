"""Each pair of engine features that needs no data-parallel group gives a plain engine's tokens, or is refused by
name.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import PenstockError, Unimplemented
from penstock_enginecore.core.control import EngineControl
from tests.fakes.engines.in_process import build_engine
from tests.fakes.engines.transferring_engine import TransferringEngine
from tests.fakes.engines.worker_threads import use_threads
from tests.pairs.features import GROUPS, Feature
from tests.pairs.models import Checkpoint
from tests.pairs.running import Pair, sections_of
from tests.pairs.table import Refused, Tested, Two, name_of, pairs

pytestmark = pytest.mark.usefixtures("warm_processes")
SLOW = frozenset({Feature.NODES, Feature.STRUCTURED, Feature.TENSOR, Feature.PIPELINE, Feature.FP8_CACHE})
"""Features whose tests are slow: they start processes or worker threads, or compute attention with torch."""
FEATURES = [*Feature]
AT_THE_REQUEST = "sleep is not supported for ranks of a data-parallel group"
TESTED = [two for two, verdict in pairs() if isinstance(verdict, Tested) and not two & GROUPS]
REFUSED = [(two, verdict.message) for two, verdict in pairs() if isinstance(verdict, Refused)]


def is_slow(two: Two) -> bool:
    """Return whether the pair's test is slow.

    Pairs with a feature in ``SLOW`` are slow. Of the other pairs, only a third is quick.
    """
    return bool(two & SLOW or sum(map(FEATURES.index, two)) % 3)


@pytest.mark.parametrize(
    "two", [pytest.param(two, marks=pytest.mark.slow if is_slow(two) else (), id=name_of(two)) for two in TESTED]
)
def test_a_pair_gives_what_a_plain_engine_gives(two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pair(two, tmp_path).check(monkeypatch)


@pytest.mark.parametrize(
    ("two", "message"),
    [pytest.param(two, message, id=name_of(two)) for two, message in REFUSED if message != AT_THE_REQUEST],
)
def test_a_pair_is_refused_by_name(
    two: Two, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: ExitStack
) -> None:
    if two & {Feature.TENSOR, Feature.PIPELINE, Feature.NODES}:
        use_threads(monkeypatch)
    checkpoint = Checkpoint(two, tmp_path)
    sections = sections_of(two, checkpoint)
    with pytest.raises(PenstockError, match=message):
        if Feature.TRANSFER in two:
            TransferringEngine(checkpoint.path, "a", ends, **sections)
        else:
            build_engine(checkpoint.path, **sections)


@pytest.mark.parametrize(
    "two", [pytest.param(two, id=name_of(two)) for two, message in REFUSED if message == AT_THE_REQUEST]
)
def test_ranks_refuse_to_sleep(two: Two, tmp_path: Path) -> None:
    checkpoint = Checkpoint(two, tmp_path)
    engine = build_engine(checkpoint.path, **sections_of(two, checkpoint))
    rank: Any = object()  # any object works, because the test calls no method of the rank
    with pytest.raises(Unimplemented, match=AT_THE_REQUEST):
        EngineControl(engine, rank).sleep(1)
    engine.shutdown()
