"""Generator of docs/reference/feature-pairs.md: ``python -m tests.pairs.page``, part of ``make settings``."""

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.pairs.features import Feature
from tests.pairs.table import Refused, SameAs, Tested, Verdict, pairs

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/feature-pairs.md"
_HEAD = """# Pairs of engine features

This page says which features an engine has together. Look here before you turn a second feature on.

A tested pair gives the tokens of one plain engine, greedy and with seeds, and again with cached prefixes. The plain engine has
one worker, takes one request at a time and reuses nothing. It has those of the two features that change tokens.

Models are tiny, in float32, on a CPU; [gpu.md](../guides/gpu.md) has the
checks of GPUs.

| mark | meaning |
|---|---|
| + | tested |
| k | tested, also with a part killed in the middle of requests, which go on at another engine |
| - | refused by name: the engine does not start, or it refuses the request |
| . | nothing to test, see below |
"""
_KILLED = """
## What is killed

- Several nodes: the second node.
- Data-parallel group, shared experts: a rank.
- KV transfer without these: the engine that gives the blocks does not answer any more.
- Other pairs: the engine. Its process is not killed, but nothing runs it any more, and another engine goes on with the tokens.

Kills at each point of a transfer are in [KV cache offloading](../guides/kv-offloading.md#what-fails), kills of each kind in
[failure-matrix.md](failure-matrix.md).

## Run the tests

```sh
make test-slow
```

`tests/integration/test_feature_pairs.py` has the pairs without groups, `tests/e2e/test_feature_pairs.py` those with groups.
Workers of tensor and pipeline parallel engines are threads there; nodes and ranks are processes. Ranks that share experts are a
group: they stand for the group in pairs with what both have.

To add a feature, add a member to `Feature` in `tests/pairs/features.py`, with what it sets. Every pair with it is then
tested, unless `tests/pairs/table.py` names the refusal or the reason. `make test` runs the quick pairs and the refusals, `make
test-slow` the others. `make settings` writes this page from the same table.
"""


def page() -> str:
    """The whole page."""
    verdicts = dict(pairs())
    return "\n".join([_HEAD, *_features(), "", *_table(verdicts), *_refusals(), *_same(), _KILLED.rstrip(), ""])


def _features() -> list[str]:
    rows = [f"| {number} | {each.title} | {each.setting} |" for number, each in enumerate(Feature, 1)]
    return ["## Features", "", "| number | feature | turned on by |", "|--:|---|---|", *rows]


def _table(verdicts: Mapping[frozenset[Feature], Verdict]) -> list[str]:
    counts = {kind: sum(isinstance(each, kind) for each in verdicts.values()) for kind in (Tested, Refused, SameAs)}
    killed = sum(isinstance(each, Tested) and bool(each.kill) for each in verdicts.values())
    features = list(Feature)
    rows = []
    for number, row in enumerate(features, 1):
        marks = [_mark(verdicts.get(frozenset({row, column}))) for column in features]
        rows.append(f"| {number} {row.title} | {' | '.join(marks)} |")
    return [
        "## Table",
        "",
        f"{len(verdicts)} pairs: {counts[Tested]} are tested, {killed} of them with a kill, {counts[Refused]} are refused, and "
        f"{counts[SameAs]} have nothing to test.",
        "",
        f"| | {' | '.join(str(number) for number in range(1, len(features) + 1))} |",
        f"|---{'|:-:' * len(features)}|",
        *rows,
    ]


def _mark(verdict: Verdict | None) -> str:
    match verdict:
        case Tested(kill):
            return "k" if kill else "+"
        case Refused():
            return "-"
        case SameAs():
            return "."
        case None:
            return ""


def _refusals() -> list[str]:
    rows = [f"| {_both(two)} | {each.message} |" for two, each in pairs() if isinstance(each, Refused)]
    return ["", "## Refused", "", "The message holds these words:", "", "| pair | words |", "|---|---|", *rows]


def _same() -> list[str]:
    rows = [f"| {_both(two)} | {each.why} |" for two, each in pairs() if isinstance(each, SameAs)]
    return ["", "## Nothing to test", "", "| pair | why |", "|---|---|", *rows]


def _both(two: frozenset[Feature]) -> str:
    return ", ".join(each.title for each in Feature if each in two)


def main() -> None:
    """Write the page, if it is another one."""
    text = page()
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        PAGE.write_text(text, encoding="utf-8")
        print("wrote docs/reference/feature-pairs.md", file=sys.stderr)


if __name__ == "__main__":
    main()
