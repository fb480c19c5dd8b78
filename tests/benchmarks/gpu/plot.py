"""Plot of decode steps: milliseconds by streams, with lower bound and target."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.benchmarks.gpu import names
from tests.benchmarks.gpu.shapes import Plan
from tests.device.records import Results


def plot(plan: Plan, results: Results, path: Path) -> None:
    """Draw the measured decode steps of the first context. Draws nothing if decode steps or ceilings are missing."""
    limits = names.ceilings(results)
    context = plan.decode[0].context
    rows = [
        (row, found)
        for row in plan.decode
        if row.context == context and (found := results.get("passes", row.name)) is not None
    ]
    if limits is None or not rows:
        return
    streams = [row.streams for row, _ in rows]
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.plot(streams, [limits.decode_ms(plan.shape, row) for row, _ in rows], "--", color="C7", label="floor")
    targets = [row.target_ms for row, _ in rows if row.target_ms is not None]
    if len(targets) == len(rows):
        axes.plot(streams, targets, ":", color="C1", label="target")
    axes.plot(streams, [found["ms"] for _, found in rows], "o-", color="C0", label="measured")
    axes.set_xscale("log", base=2)
    device = (results.get("machine", "machine") or {}).get("device", "an unknown device")
    axes.set(xlabel="streams", ylabel="ms per decode step", title=f"{plan.shape.name} on {device}, context {context}")
    axes.set_ylim(bottom=0)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(path)
