"""Short campaigns of tensors that arrive incomplete or wrong."""

import pytest

from tests.fuzz.tensors import Campaign


def test_an_invalid_tensor_ends_only_its_own_request() -> None:
    campaign = Campaign(seed=1)
    campaign.run(24)
    assert campaign.num_sequences == 24
    assert {"OK", "INVALID_ARGUMENT INVALID_FIELD", "FAILED_PRECONDITION SHARED_MEMORY_UNREADABLE"} <= set(
        campaign.ends
    )


@pytest.mark.slow
def test_tensors_of_all_kinds() -> None:
    campaign = Campaign(seed=2)
    campaign.run(1500)
    assert {"UNAVAILABLE STALE", "RESOURCE_EXHAUSTED QUEUE_FULL"} <= set(campaign.ends)
