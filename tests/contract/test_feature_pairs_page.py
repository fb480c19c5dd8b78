"""docs/reference/feature-pairs.md matches the table of pairs, and the table has one entry for each pair."""

import itertools

from tests.pairs.features import Feature
from tests.pairs.page import PAGE, page
from tests.pairs.table import REFUSED, SAME, Tested, pairs


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "it is stale; run: make settings"


def test_each_pair_has_one_verdict() -> None:
    verdicts = dict(pairs())
    every = {frozenset(two) for two in itertools.combinations(Feature, 2)}
    assert verdicts.keys() == every
    assert not REFUSED.keys() & SAME.keys()
    assert REFUSED.keys() | SAME.keys() <= every
    assert sum(isinstance(each, Tested) for each in verdicts.values()) > len(every) / 2
