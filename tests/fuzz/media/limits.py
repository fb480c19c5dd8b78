"""Media configuration of attacked services, and the resources that they must not keep."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.common.v1.stats_pb2 import MediaStats
from penstock_common.tensors.shared_memory import ROOT
from tests.fuzz.media import items
from tests.fuzz.media.names import PUBLIC_NETWORK
from tests.fuzz.variants import Variant

WORKERS = 2
STORE_BYTES = 16 * 1024 * 1024
RECEIVER_BYTES = 8 * 1024 * 1024
ENGINE_FLAGS: dict[str, Any] = {"multimodal__receiver_cache_bytes": RECEIVER_BYTES}
_LOCK = re.compile(r"penstock-([0-9a-f]{32})\.lock")


def frontend_flags(variant: Variant, port: int) -> dict[str, Any]:
    """Return the flags. ``port`` is the hostile host's. Caches are small, so that they are full when resources are
    first counted.
    """
    flags: dict[str, Any] = {
        "media__workers": WORKERS,
        "media__worker_memory": "512MiB",
        "media__worker_timeout": 10,
        "media__max_pixels": items.MAX_PIXELS,
        "media__max_bytes": items.MAX_BYTES,
        "media__max_frames": items.MAX_FRAMES,
        "media__max_audio_seconds": items.MAX_SECONDS,
        "media__store_bytes": STORE_BYTES,
        "media__fetch_timeout": 1,
    }
    if variant.domains:
        flags["media__allowed_domains"] = json.dumps([f"{domain}:{port}" for domain in variant.domains])
        flags["media__allowed_private_networks"] = json.dumps([PUBLIC_NETWORK])
    if variant.name == "images":
        flags["media__allow_features"] = "true"
    return flags


def left_by(stats: MediaStats, engine: str) -> dict[str, float]:
    """Return the values that must be 0 for an engine without requests, by name."""
    return {
        f"embeddings to be computed in {engine}": stats.pending_embeds,
        f"requests that wait for media in {engine}": stats.num_waiting_reqs,
        f"bytes in the receiver cache of {engine}, beyond its size": max(
            0, stats.receiver_cache_bytes - RECEIVER_BYTES
        ),
    }


def segments_of(pid: int) -> list[str]:
    """Return the names of shared-memory segments that a process has written and no process has read."""
    owners = {match[1] for file in _open_files(pid) if (match := _LOCK.search(file))}
    return [each.name for owner in owners for each in ROOT.glob(f"penstock-{owner}-*")]


def _open_files(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield str(descriptor.readlink())
        except FileNotFoundError:
            continue
