"""Plot of the resource use of the processes over time."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.soak.watch import IDLE, Held

PANELS = {"rss_mib": "resident set (MiB)", "fds": "open files", "threads": "threads", "tasks": "asyncio tasks"}
KV_PANELS = {
    "leased_blocks": "blocks kept for other engines",
    "arena_blocks": "blocks in shared memory",
    "host_usage": "host memory for blocks, used (0 to 1)",
    "disk_usage": "disk for blocks, used (0 to 1)",
}
"""Panels that are drawn if any process used KV transfer or offloading."""


def plot(path: Path, samples: Sequence[Held]) -> None:
    """Draw one line per service, broken where its process was replaced. Circles mark samples without requests."""
    panels = PANELS | (KV_PANELS if any(getattr(held, what) for held in samples for what in KV_PANELS) else {})
    rows = len(panels) // 2
    figure = Figure(figsize=(11, 4 * rows), dpi=110, layout="constrained")
    by_service: dict[str, dict[int, list[Held]]] = defaultdict(lambda: defaultdict(list))
    for held in samples:
        by_service[held.service][held.pid].append(held)
    for axes, (what, label) in zip(figure.subplots(rows, 2).flat, panels.items(), strict=True):
        for number, (service, processes) in enumerate(sorted(by_service.items())):
            for lives, held_by_one in enumerate(processes.values()):
                minutes = [held.at / 60 for held in held_by_one]
                values = [getattr(held, what) for held in held_by_one]
                axes.plot(minutes, values, color=f"C{number}", label=None if lives else service, linewidth=1)
            idle = [held for held_by_one in processes.values() for held in held_by_one if held.phase == IDLE]
            idle_minutes, idle_values = [held.at / 60 for held in idle], [getattr(held, what) for held in idle]
            axes.plot(idle_minutes, idle_values, "o", color=f"C{number}", markersize=5, fillstyle="none")
        axes.set(xlabel="minutes", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.suptitle("Held by each process while requests, cancels and kills come at random (circles: idle)")
    FigureCanvasAgg(figure)  # draws without a display
    figure.savefig(path)
