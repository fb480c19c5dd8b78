"""Runs of ``speculation_peer``, the comparison of the two servers, and its table."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

SERVERS = ("vLLM", "Penstock")
QUIET = 0.1
"""Maximum fraction of CPU time of other processes in an undisturbed run."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a run. ``part`` is the number of its group of ``AT_ONCE`` requests, from 0."""

    workload: str
    streams: int
    temperature: float
    part: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run.

    Attributes:
        drafts: Number of pairs of a step and a request in the step with drafts.
        others: Fraction of CPU time that other processes used.
    """

    server: str
    method: str
    dtype: str
    place: Place
    tokens: int
    seconds: float
    drafts: float
    accepted: float
    others: float
    settings: str
    texts: list[str]

    @property
    def of(self) -> tuple[str, str, str]:
        """Server, method and dtype."""
        return self.server, self.method, self.dtype


def read_runs(path: Path) -> list[Run]:
    """Return the runs in the file; empty if the file does not exist."""
    return msgspec.json.decode(path.read_bytes(), type=list[Run]) if path.exists() else []


def lacks(runs: list[Run], place: Place, times: int) -> bool:
    """Return whether a place has fewer than ``times`` runs, or no undisturbed run."""
    others = [each.others for each in runs if each.place == place]
    return len(others) < times or min(others) > QUIET


def draft_counts(metrics: str) -> tuple[float, float]:
    """Return counts from a server's metrics: steps of requests with drafts, and accepted tokens."""

    def total(name: str) -> float:
        pattern = rf"^vllm:spec_decode_num_{name}_total(?:\{{[^}}]*\}})? (\S+)"
        return sum(float(value) for value in re.findall(pattern, metrics, re.MULTILINE))

    return total("drafts"), total("accepted_tokens")


def changed_share(before: Sequence[str], after: Sequence[str]) -> float:
    """Return the share of requests whose texts differ. Raises ValueError unless both lists have the same length."""
    if len(before) != len(after):
        raise ValueError(f"{len(before)} texts beside {len(after)}")
    return sum(a != b for a, b in zip(before, after, strict=True)) / max(len(before), 1)


def counting(runs: list[Run]) -> dict[int, Run]:
    """Return the least disturbed run of each part."""
    by: dict[int, Run] = {}
    for each in sorted(runs, key=lambda each: each.others, reverse=True):
        by[each.place.part] = each
    return dict(sorted(by.items()))


def rate(runs: Iterable[Run]) -> float:
    """Return the tokens per second."""
    runs = list(runs)
    return sum(each.tokens for each in runs) / sum(each.seconds for each in runs)


def texts(runs: dict[int, Run], parts: Iterable[int]) -> list[str]:
    """Return the texts of these parts, in their order."""
    return [text for part in parts for text in runs[part].texts]


def cell(runs: list[Run], before: list[Run]) -> dict[str, float]:
    """Return the results of one server with a method (``runs``) and without drafts (``before``).

    They are: tokens/s of both; tokens per step that had drafts, and per step of a request; the share of texts that
    differ between the two, and between two runs without drafts; and the maximum processor share of other processes.
    """
    on, off = counting(runs), counting(before)
    again = {part: each for each in before if each is not off[part := each.place.part]}
    drafts, accepted = (sum(getattr(each, name) for each in on.values()) for name in ("drafts", "accepted"))
    tokens, both = sum(each.tokens for each in on.values()), sorted(on.keys() & off.keys())
    return {
        "off": rate(off.values()),
        "on": rate(on.values()),
        "length": 1 + accepted / drafts if drafts else 1.0,
        "per step": tokens / (tokens - accepted),
        "changed": changed_share(texts(off, both), texts(on, both)),
        "again": changed_share(texts(off, sorted(again)), texts(again, sorted(again))),
        "others": max(each.others for each in (*off.values(), *on.values())),
    }


def report(runs: list[Run]) -> str:
    """Return the table in Markdown.

    A row is a dtype, method, number of streams and temperature that both servers have.
    """
    by: dict[tuple[str, str, str, int, float, str], list[Run]] = defaultdict(list)
    for each in runs:
        place = each.place
        by[each.server, each.dtype, place.workload, place.streams, place.temperature, each.method].append(each)
    lines = [
        "| | streams | temperature | vLLM off | on | Penstock off | on | beside vLLM | length, vLLM | Penstock "
        "| per step, vLLM | Penstock | changed, vLLM | Penstock | asked again, vLLM | Penstock | others |",
        "|---|" + "--:|" * 16,
    ]
    for (server, dtype, workload, streams, temperature, method), found in sorted(by.items()):
        where = (dtype, workload, streams, temperature)
        beside = by.get((SERVERS[1], *where, method))
        if server != SERVERS[0] or method == "off" or not beside:
            continue
        pair = [cell(each, by[name, *where, "off"]) for name, each in zip(SERVERS, (found, beside), strict=True)]
        cells = [f"{method}, {dtype}", str(streams), f"{temperature:g}"]
        cells += [f"{each[key]:.0f}" for each in pair for key in ("off", "on")]
        cells += [f"{pair[1]['on'] / pair[0]['on']:.2f}"]
        cells += [f"{each[key]:.2f}" for key in ("length", "per step") for each in pair]
        cells += [f"{100 * each[key]:.0f} %" for key in ("changed", "again") for each in pair]
        cells.append(f"{100 * max(each['others'] for each in pair):.0f} %")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
