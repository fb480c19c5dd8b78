"""A short campaign against both ends of a pull."""

from tests.fuzz.pull import Campaign


def test_engines_outlive_what_is_no_engine() -> None:
    campaign = Campaign(seed=1)
    campaign.run(200)
    assert {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION"} <= set(campaign.codes)
    assert {"protocol", "ended"} <= set(campaign.reasons)
