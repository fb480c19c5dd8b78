"""Streams of models with recurrent layers survive kills of the engines that compute them, without a difference."""

from pathlib import Path

import pytest

from tests.benchmarks.kills import KV_CACHE_MEMORY, rows_of_requests
from tests.chaos.killing import undisturbed, with_kills
from tests.chaos.summary import paired, summarize
from tests.fakes.models.tiny_models import save_speaking_model
from tests.fakes.systems.cluster import Cluster

STREAMS = 56
KILLS = 4
RANGE = 0.1
"""Standard deviation of the random weights.

The recomputed state of a resumed answer differs by rounding. Wider weights amplify the difference of log-probabilities
from 1e-6 to 1e-4. Of 100000 sampled tokens, one then falls on the other side of the drawn number.
"""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("architecture", ["qwen3_5", "granitemoehybrid"])
async def test_no_stream_fails_or_differs_over_four_kills(architecture: str, tmp_path: Path) -> None:
    save_speaking_model(architecture, tmp_path, initializer_range=RANGE)
    load = rows_of_requests(STREAMS, 4, 600)
    async with Cluster(tmp_path, engines=3, kv_cache_memory=KV_CACHE_MEMORY) as cluster:
        await undisturbed(cluster, rows_of_requests(STREAMS, 1, 40))  # compiled constraints, connections
        calm = await undisturbed(cluster, load)
        killed = await with_kills(cluster, load, calm, kills=KILLS)
    assert calm.finished == STREAMS
    summary = summarize(paired(load, calm.outcomes, killed.outcomes), streams=STREAMS, finished=killed.finished)
    assert (summary.failed, summary.duplicated, summary.lost, summary.differing) == (0, 0, 0, 0), summary.examples
    assert summary.finished == STREAMS
    assert len(killed.kills) == KILLS
    assert min(kill.running for kill in killed.kills) > 0
