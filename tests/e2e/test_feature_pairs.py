"""Each feature gives a plain engine's tokens on a data-parallel group of two processes, also when a rank is killed."""

from pathlib import Path

import pytest

from tests.pairs.features import GROUPS, Feature
from tests.pairs.table import Tested, Two, name_of, pairs

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.usefixtures("warm_processes")]
WITH_GROUPS = [two for two, verdict in pairs() if isinstance(verdict, Tested) and two & GROUPS]
TESTED = [
    two
    for two in WITH_GROUPS
    if Feature.EXPERTS in two or (two - {Feature.GROUP} | {Feature.EXPERTS}) not in WITH_GROUPS
]
"""Pairs to test. Expert-parallel ranks also form a data-parallel group.

If a feature is tested with expert parallelism, the test with a plain data-parallel group is left out.
"""


@pytest.mark.parametrize("two", [pytest.param(two, id=name_of(two)) for two in TESTED])
async def test_a_group_gives_what_a_plain_engine_gives_also_when_a_rank_is_killed(two: Two, tmp_path: Path) -> None:
    from tests.pairs.groups import GroupPair  # imported here, because only one of the test processes needs torch

    await GroupPair(two, tmp_path).check_group()
