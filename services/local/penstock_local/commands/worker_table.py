"""What operators are shown of an engine's workers and their devices."""

from collections.abc import Mapping, Sequence
from typing import Any

_GIB = 2**30


def device_of(workers: Sequence[Mapping[str, Any]]) -> str:
    """A cell: which devices, how much of the fullest one's memory is used, and how many steps are replays. Empty for engines that
    do not say.
    """
    known = [worker for worker in workers if worker.get("device")]
    if not known:
        return ""
    names = sorted({worker.get("device_name") or worker["device"] for worker in known})
    count = f"{len(workers)} x " if len(workers) > 1 else ""
    down = [str(worker["rank"]) for worker in workers if not worker.get("up", True)]
    memory = [worker for worker in known if worker.get("total_memory")]
    text = count + ", ".join(names)
    if memory:
        fullest = max(memory, key=lambda worker: worker["used_memory"] / worker["total_memory"])
        text += f" {fullest['used_memory'] / _GIB:.0f}/{fullest['total_memory'] / _GIB:.0f} GiB"
        text += _replayed(known)
    return text + (f", down: {', '.join(down)}" if down else "")


def _replayed(workers: Sequence[Mapping[str, Any]]) -> str:
    """The share of steps that GPUs replayed, and of what these computed for nobody; empty before there were any."""
    found = [worker.get("graphs", {}) for worker in workers]
    replays, launched, tokens, padding = (
        sum(graphs.get(name, 0) for graphs in found) for name in ("replays", "launched", "tokens", "padding_tokens")
    )
    if not replays:
        return ""
    return f", {replays / (replays + launched):.0%} replayed, {padding / max(tokens, 1):.0%} padding"
