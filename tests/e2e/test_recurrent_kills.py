"""Streams of models with recurrent layers survive kills of the engines that compute them.

Engines compute the states of a resumed answer anew, from more tokens at once. The CPU kernels' decoder gives them the same
bits, so sampled tokens are the same too.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.kills import KV_CACHE_MEMORY, rows_of_requests
from tests.chaos.killing import undisturbed, with_kills
from tests.chaos.summary import Pair, paired, summarize
from tests.fakes.models.tiny_models import save_speaking_model
from tests.fakes.systems.cluster import Cluster

STREAMS = 56
KILLS = 4
MOST_ROUNDED = 2
"""Maximum number of requests with a sampled token that rounding changed, of more than 80 sampled requests."""

pytestmark = pytest.mark.slow


def save_decided_model(architecture: str, path: Path) -> None:
    """Write a checkpoint whose random weights are narrow, for little rounding, and whose head makes one token likely."""
    model: Any = save_speaking_model(architecture, path, initializer_range=0.1)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40.0)
    model.save_pretrained(path)


def is_sampled(pair: Pair) -> bool:
    return "sampled" in pair.request.kind


@pytest.mark.parametrize("architecture", ["qwen3_5", "granitemoehybrid_dense", "lfm2"])
async def test_no_stream_fails_and_no_greedy_one_differs_over_four_kills(architecture: str, tmp_path: Path) -> None:
    save_decided_model(architecture, tmp_path)
    load = rows_of_requests(STREAMS, 3, 600)
    async with Cluster(tmp_path, engines=3, kv_cache_memory=KV_CACHE_MEMORY) as cluster:
        await undisturbed(cluster, rows_of_requests(STREAMS, 1, 40))  # compiled constraints, connections
        calm = await undisturbed(cluster, load)
        killed = await with_kills(cluster, load, calm, kills=KILLS)
    assert (calm.finished, killed.finished) == (STREAMS, STREAMS)
    assert min(kill.running for kill in killed.kills) > 0
    pairs = paired(load, calm.outcomes, killed.outcomes)
    greedy, sampled = (
        summarize([pair for pair in pairs if is_sampled(pair) is sample], streams=STREAMS, finished=killed.finished)
        for sample in (False, True)
    )
    assert greedy.harmed == 0, greedy.examples
    assert (sampled.failed, sampled.duplicated, sampled.lost) == (0, 0, 0), sampled.examples
    assert sampled.requests > 80
    assert sampled.differing <= MOST_ROUNDED, sampled.examples
    print(f"{architecture}: {len(pairs)} requests, {sampled.differing} differ by rounding: {sampled.examples}")
