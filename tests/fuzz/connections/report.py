"""Tables with the results of a campaign."""

from typing import Any, NamedTuple

from tests.fuzz.connections.system import Amounts
from tests.fuzz.findings import Findings


class Beside(NamedTuple):
    """Results of the neighbours: counts of answers, and longest waits in seconds.

    ``quiet`` has the waits without hostile connections. ``peaks`` has the peak memory of each process in MiB.
    """

    waits: dict[str, float]
    quiet: dict[str, float]
    counts: dict[str, int]
    peaks: dict[str, int]


class Outcome(NamedTuple):
    """Results besides the findings. ``holds`` has the longest time in ms that each event loop was blocked, as CPU time
    and as wall time without other programs, with the cause.
    """

    connections: int
    seconds: float
    beside: Beside
    before: dict[str, Amounts]
    after: dict[str, Amounts]
    holds: dict[str, tuple[int, int, list[dict[str, Any]]]]
    logs: dict[str, str]


def report(outcome: Outcome, findings: Findings) -> str:
    """Return all results as tables."""
    rate = outcome.connections / max(outcome.seconds, 1e-9)
    lines = [findings.table(), ""]
    lines += [f"{outcome.connections} connections in {outcome.seconds:.0f} s ({rate:.0f} per second)"]
    waits, quiet, counts, peaks = outcome.beside
    lines += ["neighbours         longest wait s  undisturbed       parts"]
    for kind, wait in sorted(waits.items()):
        lines.append(f"{kind:18} {wait:14.3f} {quiet.get(kind, 0.0):12.3f} {counts.get(kind, 0):11}")
    lines += [
        "held by             RSS MiB      threads      fds          connections  tasks        (before, after), peak MiB"
    ]
    for name, old in outcome.before.items():
        new = outcome.after.get(name, old)
        held = zip(old.held.amounts, new.held.amounts, strict=True)
        rss, threads, fds, tasks = (f"{a}, {b}" for a, b in held)
        connections = f"{len(old.connections)}, {len(new.connections)}"
        shown = "  ".join(f"{each:11}" for each in (rss, threads, fds, connections, tasks))
        lines.append(f"{name:18}  {shown}  {peaks.get(name, '-')}")
    lines += ["longest hold of the event loop: computing; by the clock, without what other programs took"]
    for name, (computing, clock, blocks) in outcome.holds.items():
        lines.append(f"{name:18} {computing} ms, {clock} ms")
        lines += [
            f"    {each['cpu_ms']} ms, {each['wall_ms']} ms: {' < '.join(reversed(each['stack'][-8:]))}"
            for each in blocks[:6]
        ]
    wrong = findings.wrong()
    return "\n".join([*lines, "", f"wrong: {len(wrong)} kinds", *wrong])
