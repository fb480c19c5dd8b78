"""Random walks with eight ranks, three frontends, and any order of events and faults. There are too many states to
explore all.
"""

import pytest

from tests.modelcheck.explore import shown
from tests.modelcheck.walk import MANY, walk


@pytest.mark.parametrize("seed", range(6))
def test_everything_comes_to_rest_on_the_way(seed):
    walked = walk(MANY, str(seed))
    assert walked.violation is None, "\n".join([str(walked.violation), *(shown(label) for label in walked.labels)])
    assert len(walked.labels) > 30
