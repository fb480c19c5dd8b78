"""The cell that says where an engine computes."""

from typing import Any

import pytest

from penstock_local.commands.status import device_of

GIB = 2**30
GPU = {
    "device": "cuda:0",
    "device_name": "NVIDIA H200",
    "total_memory": 140 * GIB,
    "used_memory": 100 * GIB,
    "up": True,
}


@pytest.mark.parametrize(
    ("workers", "cell"),
    [
        ([], ""),
        ([{"rank": 0, "up": True, "device": ""}], ""),
        ([{"rank": 0, "up": True, "device": "cpu", "total_memory": 0}], "cpu"),
        ([{"rank": 0, **GPU}], "NVIDIA H200 100/140 GiB"),
        ([{"rank": 0, **GPU}, {"rank": 1, **GPU, "used_memory": 120 * GIB}], "2 x NVIDIA H200 120/140 GiB"),
        (
            [{"rank": 0, **GPU, "graphs": {"replays": 97, "launched": 3, "tokens": 400, "padding_tokens": 48}}],
            "NVIDIA H200 100/140 GiB, 97% replayed, 12% padding",
        ),
        ([{"rank": 0, **GPU, "graphs": {"replays": 0, "launched": 3}}], "NVIDIA H200 100/140 GiB"),
        ([{"rank": 0, "up": True, "device": "cpu"}, {"rank": 1, "up": False, "device": "cpu"}], "2 x cpu, down: 1"),
    ],
)
def test_devices_and_the_fullest_ones_memory(workers: list[dict[str, Any]], cell: str) -> None:
    assert device_of(workers) == cell
