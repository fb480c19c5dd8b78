"""Generator of docs/reference/feature-pairs.md: ``python -m tests.pairs.page``, part of ``make settings``."""

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.pairs.features import Feature
from tests.pairs.table import Refused, SameAs, Tested, Verdict, pairs

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/feature-pairs.md"
_HEAD = """# Feature pairs

This page lists which engine features work together. Read it before you enable a second feature.

For a tested pair, an engine with both features produces the same tokens as a plain engine, in greedy requests and in seeded
requests. The test then repeats the requests with cached prefixes. The plain engine has one worker, runs one request at a time and
reuses no KV blocks. If a feature changes tokens by design, the plain engine has that feature too. The tests use tiny models in
float32 on a CPU; the [GPU guide](../guides/gpu.md) lists the checks on GPUs.

| Mark | Meaning |
|---|---|
| + | tested |
| k | tested; a second test kills [a process](#killed-processes) during requests, which then resume on another engine |
| - | refused with an error message: the engine does not start, or the engine refuses the request |
| . | nothing to test; the last table gives the [reason](#nothing-to-test) |
"""
_KILLED = """
## Killed processes

The features of a pair determine which process the test kills:

- Pairs with several nodes: the second node.
- Pairs with a data-parallel group or shared experts: a rank.
- Pairs with KV transfer, but without several nodes or a group: the engine that sends the KV blocks stops answering.
- All other pairs: the engine. The test stops the engine, and another engine continues the requests after their last tokens.

[KV cache offloading](../guides/kv-offloading.md#what-fails) covers kills at each point of a block's transfer, and the
[failure matrix](failure-matrix.md) covers all kinds of failures.

## Run the tests

```sh
make test-slow
```

`tests/integration/test_feature_pairs.py` has the pairs without groups, and `tests/e2e/test_feature_pairs.py` the pairs with
groups. In these tests, workers of tensor and pipeline parallel engines are threads; nodes and ranks are processes. Ranks that
share experts are also a data-parallel group. So a test with shared experts also tests the group.

To add a feature, add a member to `Feature` in `tests/pairs/features.py`, with the settings of the feature. Every pair with the
new feature is then tested, unless `tests/pairs/table.py` has a refusal for the pair, or a reason why there is nothing to test.
`make test` runs the quick pairs and the refusals, and `make test-slow` runs all other pairs. `make settings` writes this page
from `tests/pairs/table.py`.
"""


def page() -> str:
    """Return the text of the page."""
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
        f"There are {len(verdicts)} pairs: {counts[Tested]} are tested, {killed} of them also with a killed process, "
        f"{counts[Refused]} are refused, and {counts[SameAs]} have nothing to test.",
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
    return [
        "",
        "## Refused",
        "",
        "If you enable both features of a pair, the error message contains the text in this table:",
        "",
        "| pair | text |",
        "|---|---|",
        *rows,
    ]


def _same() -> list[str]:
    rows = [f"| {_both(two)} | {each.why} |" for two, each in pairs() if isinstance(each, SameAs)]
    return ["", "## Nothing to test", "", "| pair | reason |", "|---|---|", *rows]


def _both(two: frozenset[Feature]) -> str:
    return ", ".join(each.title for each in Feature if each in two)


def main() -> None:
    """Write the page if it has changed."""
    text = page()
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        PAGE.write_text(text, encoding="utf-8")
        print("wrote docs/reference/feature-pairs.md", file=sys.stderr)


if __name__ == "__main__":
    main()
