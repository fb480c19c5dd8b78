"""Check that a run is valid: no row failed, and a GPU used the fused decoder and its graphs."""

import json
from typing import Any

from tests.device.records import Results

FUSED = "fused decoder"
_WIDTH = 160


def row_line(record: dict[str, Any]) -> str:
    """Return a line about an ended row."""
    found = record.get("found", {})
    good = record["kind"] == "row" and found.get("ok", True)
    says = record.get("error") or found.get("says") or _brief(found)
    name = f"{record['phase']}: {record['row']}"
    return f"{'ok  ' if good else 'FAIL'} {name:34s} {record.get('seconds', 0):6.1f} s  {' '.join(str(says).split())}"[
        :_WIDTH
    ]


def slow_ways(results: Results) -> list[str]:
    """Return reasons why rows did not use the fused decoder or did not replay graphs.

    ``computing`` and ``not_replayed`` of the rows contain this. ``not_replayed`` is empty for replayed steps.
    """
    found = []
    for (phase, row), values in results.found.items():
        computing = values.get("computing")
        if computing is not None and FUSED not in computing:
            found.append(f"{phase}: {row}: computed by {computing}, not by the {FUSED}")
        if values.get("not_replayed"):
            found.append(f"{phase}: {row}: graphs were not used: {values['not_replayed']}")
    return found


def verdict(results: Results, *, cpu: bool) -> tuple[int, str]:
    """Return the exit status, and a line that explains the status."""
    failed = [f"{phase}: {row}" for phase, row in results.errors]
    failed += [f"{phase}: {row}" for (phase, row), found in results.found.items() if not found.get("ok", True)]
    parts = []
    if not cpu and (slow := slow_ways(results)):
        parts.append(f"the {FUSED} or its graphs were not used in {len(slow)} rows, first {slow[0]}")
    if failed:
        parts.append(f"{len(failed)} rows failed: {', '.join(failed[:8])}{', ...' if len(failed) > 8 else ''}")
    if results.unrun:
        reasons = sorted(set(results.unrun.values()))
        parts.append(f"{len(results.unrun)} rows were not run: {', '.join(reasons)}")
    if not results.found and not parts:
        parts.append("no row was run")
    if parts:
        return 1, f"FAILED: {'; '.join(parts)}"
    return 0, f"OK: {len(results.found)} rows"


def _brief(found: dict[str, Any]) -> str:
    """Return a row's values in short."""
    # Leave out fields that every row of a phase has.
    shown = {key: value for key, value in found.items() if key != "computing"} or found
    numbers = {key: _rounded(value) for key, value in shown.items()}
    return json.dumps(numbers).replace('"', "")


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
