"""Streams of models with recurrent layers survive kills of the engines that compute them.

Engines compute the states of a resumed answer anew, from more tokens at once. The CPU kernels' decoder gives them the same
bits, so sampled tokens are the same too.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.kills import KV_CACHE_MEMORY, rows_of_requests
from tests.chaos.killing import undisturbed, with_kills
from tests.chaos.summary import paired, summarize
from tests.fakes.models.tiny_models import save_speaking_model
from tests.fakes.systems.cluster import Cluster

ARCHITECTURES = ["qwen3_5"]
if os.environ.get("PENSTOCK_RECURRENT") == "full":  # make recurrent-matrix
    ARCHITECTURES += ["granitemoehybrid_dense"]
STREAMS = 56
KILLS = 4

pytestmark = pytest.mark.slow


def save_decided_model(architecture: str, path: Path) -> None:
    """Write a checkpoint whose head makes one token likely, so that few sampled answers end early."""
    model: Any = save_speaking_model(architecture, path)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)
    model.save_pretrained(path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_no_stream_fails_or_differs_over_four_kills(architecture: str, tmp_path: Path) -> None:
    save_decided_model(architecture, tmp_path)
    load = rows_of_requests(STREAMS, 8, 600)
    async with Cluster(tmp_path, engines=3, kv_cache_memory=KV_CACHE_MEMORY) as cluster:
        await undisturbed(cluster, rows_of_requests(STREAMS, 1, 40))  # compiled constraints, connections
        calm = await undisturbed(cluster, load)
        killed = await with_kills(cluster, load, calm, kills=KILLS)
    assert (calm.finished, killed.finished) == (STREAMS, STREAMS)
    assert min(kill.running for kill in killed.kills) > 0
    pairs = paired(load, calm.outcomes, killed.outcomes)
    assert sum("sampled" in pair.request.kind for pair in pairs) > 80
    summary = summarize(pairs, streams=STREAMS, finished=killed.finished)
    assert summary.harmed == 0, summary.examples
