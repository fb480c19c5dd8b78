"""What was measured beside floors and targets, as tables for a terminal and for a page, and as a plot."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.benchmarks.gpu import ceilings
from tests.benchmarks.gpu.shapes import Ceilings, Plan

UNMEASURED = "unmeasured"


def lines(plan: Plan, results: dict[str, Any]) -> Iterator[str]:
    """Tables in Markdown. A figure that no phase has brought is called unmeasured."""
    yield f"Device: {results.get('device', UNMEASURED)}. Shape: {plan.shape.name}, {plan.shape.dtype}, random weights."
    limits = ceilings.read(results["ceilings"]) if _ok(results, "ceilings") else None
    if limits is None:
        yield f"Ceilings: {UNMEASURED}."
    else:
        rates = f"{limits.copy_rate / 1e12:.2f} TB/s copied, {limits.product_rate / 1e12:.0f} TFLOP/s"
        yield f"Ceilings: {rates}."
    yield f"Computing with: {results['passes']['computing'] if _ok(results, 'passes') else UNMEASURED}."
    yield from (
        "",
        "| streams | context | floor ms | target ms | ms | of the floor | tokens/s |",
        "|---|---|---|---|---|---|---|",
    )
    yield from (_decode(plan, results, limits, index) for index in range(len(plan.decode)))
    yield from ("", "| prompt | floor ms | target ms | ms | of the floor |", "|---|---|---|---|---|")
    yield from (_prefill(plan, results, limits, index) for index in range(len(plan.prefill)))
    yield from ("", "| batch invariant | ms | beside the default | same bits |", "|---|---|---|---|")
    yield from _invariant(plan, results)
    yield from (
        "",
        "| streams | in-process tokens/s | over gRPC tokens/s | ITL ms in-process | over gRPC |",
        "|---|---|---|---|---|",
    )
    yield from (_engine(results, streams) for streams in plan.engine_streams)
    yield from ("", "| attention of one layer | floor ms | ms | of the floor | error |", "|---|---|---|---|---|")
    yield from (_attention(plan, results, limits, index) for index in range(len(plan.decode)))
    yield from ("", "| streams | context | tokens of each | ms | beside one token |", "|---|---|---|---|---|")
    yield from _verify(plan, results)
    yield from ("", "| adapters | streams | rank | ms | beside none |", "|---|---|---|---|---|")
    yield from _adapted(plan, results)
    yield from ("", "| updates of one product | rows | adapters | rank | ms | error |", "|---|---|---|---|---|---|")
    yield from _updates(results)
    yield ""
    yield f"Device idle while decoding: {_idle(results)}."
    yield from _peers(results)
    for name, result in results.items():
        if isinstance(result, dict) and "error" in result:
            yield f"Phase {name} failed: {result['error']}"


def plot(plan: Plan, results: dict[str, Any], path: Path) -> None:
    """Milliseconds of a decode step by streams: floor, target and what was measured."""
    limits = ceilings.read(results["ceilings"])
    context = plan.decode[0].context
    rows = [
        (row, found)
        for row, found in zip(plan.decode, results["passes"]["decode"], strict=True)
        if row.context == context and found is not None
    ]
    streams = [row.streams for row, _ in rows]
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.plot(streams, [limits.decode_ms(plan.shape, row) for row, _ in rows], "--", color="C7", label="floor")
    targets = [row.target_ms for row, _ in rows if row.target_ms is not None]
    if len(targets) == len(rows):
        axes.plot(streams, targets, ":", color="C1", label="target")
    axes.plot(streams, [found["ms"] for _, found in rows], "o-", color="C0", label="measured")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="streams",
        ylabel="ms per decode step",
        title=f"{plan.shape.name} on {results['device']}, context {context}",
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(path)


def _ok(results: dict[str, Any], phase: str) -> bool:
    return phase in results and "error" not in results[phase]


def _passed(results: dict[str, Any], kind: str, index: int) -> float | None:
    """Milliseconds of a row; None where it was not measured, or did not fit."""
    found = results["passes"][kind][index] if _ok(results, "passes") else None
    return None if found is None else found["ms"]


def _decode(plan: Plan, results: dict[str, Any], limits: Ceilings | None, index: int) -> str:
    row = plan.decode[index]
    floor = limits.decode_ms(plan.shape, row) if limits else None
    found = _passed(results, "decode", index)
    rate = f"{row.streams / found * 1e3:.0f}" if found else UNMEASURED
    cells = (row.streams, row.context, _ms(floor), _ms(row.target_ms, "none"), _ms(found), _share(floor, found), rate)
    return _row(cells)


def _prefill(plan: Plan, results: dict[str, Any], limits: Ceilings | None, index: int) -> str:
    prefill = plan.prefill[index]
    floor = limits.prefill_ms(plan.shape, prefill) if limits else None
    found = _passed(results, "prefill", index)
    return _row((prefill.tokens, _ms(floor), _ms(prefill.target_ms, "none"), _ms(found), _share(floor, found)))


def _invariant(plan: Plan, results: dict[str, Any]) -> Iterator[str]:
    """Rows of decodes, and of prompts."""
    names = {
        "decode": [f"{row.streams} x {row.context}" for row in plan.decode],
        "prefill": [f"prompt of {prefill.tokens}" for prefill in plan.prefill],
    }
    for kind, of_kind in names.items():
        for index, name in enumerate(of_kind):
            found = results["invariant"][kind][index] if _ok(results, "invariant") else None
            if found is None:
                yield _row((name, *[UNMEASURED] * 3))
                continue
            usual = _passed(results, kind, index)
            price = f"{found['ms'] / usual:.2f}x" if usual else UNMEASURED
            yield _row((name, _ms(found["ms"]), price, "yes" if found["same_bits"] else "NO"))


def _attention(plan: Plan, results: dict[str, Any], limits: Ceilings | None, index: int) -> str:
    row = plan.decode[index]
    name = f"{row.streams} x {row.context}"
    floor = limits.attention_ms(plan.shape, row) if limits else None
    if not _ok(results, "kernels"):
        return _row((name, _ms(floor), *[UNMEASURED] * 3))
    found = results["kernels"]["decode"][index]
    return _row((name, _ms(floor), _ms(found["ms"]), _share(floor, found["ms"]), f"{found['error']:.1e}"))


def _engine(results: dict[str, Any], streams: int) -> str:
    if not _ok(results, "engine"):
        return _row((streams, *[UNMEASURED] * 4))
    rows = [results["engine"][name][str(streams)] for name in ("in-process", "over gRPC")]
    return _row((streams, *(f"{row['tokens_per_s']:.0f}" for row in rows), *(f"{row['itl_ms']:.2f}" for row in rows)))


def _verify(plan: Plan, results: dict[str, Any]) -> Iterator[str]:
    """Steps that verify drafts, each beside the first of its streams."""
    measured = iter(results["verify"]["verify"] if _ok(results, "verify") else ())
    for row in plan.verify:
        one = None
        for tokens in plan.verified:
            found = next(measured, None)
            ms = found["ms"] if found else None
            one = one or ms
            times = f"{ms / one:.2f}x" if ms and one else UNMEASURED
            yield _row((row.streams, row.context, tokens, _ms(ms), times))


def _adapted(plan: Plan, results: dict[str, Any]) -> Iterator[str]:
    """Decode steps with adapters, each beside that of its streams without."""
    if not _ok(results, "lora"):
        yield from (_row(("any", row.streams, *[UNMEASURED] * 3)) for row in plan.adapted)
        return
    for each in results["lora"]["steps"]:
        if each is not None:
            times = f"{each['ms'] / each['base_ms']:.2f}x"
            yield _row((each["adapters"], each["streams"], each["rank"], _ms(each["ms"]), times))


def _updates(results: dict[str, Any]) -> Iterator[str]:
    """Shrink and expand alone."""
    for each in results["lora"]["updates"] if _ok(results, "lora") else []:
        cells = (each["product"], each["rows"], each["adapters"], each["rank"], _ms(each["ms"]))
        yield _row((*cells, f"{each['error']:.1e}"))


def _idle(results: dict[str, Any]) -> str:
    if not _ok(results, "idle") or results["idle"]["idle"] is None:
        return UNMEASURED
    found = results["idle"]
    return f"{found['idle']:.1%} at {found['streams']} streams, {found['launches']:.0f} launches a step"


def _peers(results: dict[str, Any]) -> Iterator[str]:
    if not _ok(results, "peers"):
        yield f"Peers: {UNMEASURED}."
        return
    for name, found in results["peers"]["peers"].items():
        streams = results["peers"]["streams"]
        yield f"{name}: {found['tokens_per_s']:.0f} tokens/s, {found['step_ms']:.2f} ms a step at {streams} streams."


def _ms(value: float | None, missing: str = UNMEASURED) -> str:
    return missing if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _share(floor: float | None, found: float | None) -> str:
    return UNMEASURED if floor is None or found is None else f"{floor / found:.0%}"


def _row(cells: tuple[object, ...]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
