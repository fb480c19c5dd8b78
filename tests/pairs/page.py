"""Generator of docs/reference/feature-pairs.md: ``python -m tests.pairs.page``, part of ``make settings``."""

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.pairs.features import Feature
from tests.pairs.table import Refused, SameAs, Tested, Verdict, pairs

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/feature-pairs.md"
_HEAD = """# Feature pairs

This page lists which engine features work together. Look here before you enable a second feature.

For a tested pair, an engine with both features produces the tokens of a plain engine: greedy and with seeds, and again with
cached prefixes. The plain engine has one worker, runs one request at a time and reuses no blocks. If a feature changes tokens by
design, the plain engine has that feature too. The tests use tiny models in float32 on a CPU; the [GPU guide](../guides/gpu.md)
lists the checks on GPUs.

| Mark | Meaning |
|---|---|
| + | tested |
| k | tested, also while a part is killed during requests, which resume on another engine |
| - | refused by name: the engine does not start, or it refuses the request |
| . | nothing to test, for the reason below |
"""
_KILLED = """
## Killed parts

- Several nodes: the second node.
- Data-parallel group, shared experts: a rank.
- KV transfer without these: the engine that gives the blocks stops answering.
- Other pairs: the engine. The test stops running it, and another engine continues with the tokens so far.

[KV cache offloading](../guides/kv-offloading.md#what-fails) covers kills at each point of a transfer, and the
[failure matrix](failure-matrix.md) covers all kinds of failures.

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
