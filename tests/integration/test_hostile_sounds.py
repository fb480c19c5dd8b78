"""Hostile audio files of all formats go through real media workers: each is decoded or refused, and no worker dies."""

import pytest

from tests.fuzz.sounds import REASONS, campaign


@pytest.mark.parametrize("count", [250, pytest.param(3000, marks=pytest.mark.slow)])
async def test_hostile_sounds_are_decoded_or_refused(count: int) -> None:
    outcome = await campaign(count)
    assert outcome.workers_after == outcome.workers_before
    assert outcome.counts.total() == count
    assert outcome.counts.keys() <= {*REASONS, "taken"}
    assert min(outcome.counts["MEDIA_UNREADABLE"], outcome.counts["taken"]) > count / 10
