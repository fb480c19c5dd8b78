"""Tables of a run, read from its records: results with lower bounds and targets, and the kernels that computed them."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.benchmarks.gpu import names
from tests.benchmarks.gpu.plans import PLANS
from tests.benchmarks.gpu.shapes import Ceilings, DecodeRow, Plan
from tests.device.records import FILE, Results, read

UNMEASURED = "unmeasured"
Line = tuple[object, ...]


def show(folder: Path) -> int:
    """Print the tables of the run in ``folder``, and write the tables into the folder. Draws a plot if matplotlib is
    installed.
    """
    results = read(folder / FILE)
    plan = PLANS[results.session["shape"]]
    text = "\n".join(lines(plan, results))
    print(text)
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib"):
        from tests.benchmarks.gpu.plot import plot

        plot(plan, results, folder / "decode.png")
    return 0


def lines(plan: Plan, results: Results) -> Iterator[str]:
    """Return the tables in Markdown. Missing numbers are shown as unmeasured."""
    machine = results.get("machine", "machine") or {}
    software = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton", "transformers") if name in machine)
    device = machine.get("device", UNMEASURED)
    yield f"Device: {device}. Shape: {plan.shape.name}, {plan.shape.dtype}, random weights. Software: {software or UNMEASURED}."
    limits = names.ceilings(results)
    if limits is None:
        yield f"Ceilings: {UNMEASURED}."
    else:
        yield f"Ceilings: {limits.copy_rate / 1e12:.2f} TB/s copied, {limits.product_rate / 1e12:.0f} TFLOP/s."
    if compiled := results.of("compile"):
        count = sum(found.get("compiled", 0) for found in compiled.values())
        longest = max(found.get("compile_s", 0) for found in compiled.values())
        yield f"Compiled before: {count} kernels in {len(compiled)} processes, {longest:.0f} s."
    table = Tables(plan, results, limits)
    yield from table.computing()
    yield from table.decode()
    yield from table.prefill()
    yield from table.verify()
    yield from table.launched()
    yield from table.serial()
    yield from table.mixtures()
    yield from table.products()
    yield from table.tiles()
    yield from table.sampling()
    yield from table.attention()
    yield from table.invariant()
    yield from table.adapted()
    yield from table.updates()
    yield from table.served()
    yield from table.mixed()
    yield ""
    yield _start(results)
    yield f"Device idle while decoding: {_idle(results)}."
    yield from _failures(results)


class Tables:
    """Tables of one run. ``limits`` is None if the ceilings are unmeasured."""

    def __init__(self, plan: Plan, results: Results, limits: Ceilings | None) -> None:
        self._plan = plan
        self._results = results
        self._limits = limits

    def computing(self) -> Iterator[str]:
        """Yield a table of the kernels of each phase's rows, and whether steps were replayed."""
        ways: list[Line] = []
        for phase in names.COMPUTING:
            rows = self._results.of(phase)
            computing = sorted({found["computing"] for found in rows.values() if found.get("computing")})
            failures = sorted({found["not_replayed"] for found in rows.values() if found.get("not_replayed")})
            replayed = [found for found in rows.values() if "not_replayed" in found]
            graphs = "; ".join(failures) if failures else "used" if replayed else UNMEASURED
            ways.append((phase, ", ".join(computing) or UNMEASURED, graphs))
        yield from _table("phase | computing | graphs", ways)

    def decode(self) -> Iterator[str]:
        """Yield the table of decode steps."""
        yield from _table(
            "streams | context | floor ms | target ms | ms | of the floor | tokens/s",
            (self._decode(row) for row in self._plan.decode),
        )

    def _decode(self, row: DecodeRow) -> Line:
        found, floor = self._ms("passes", row.name), self._floor(Ceilings.decode_ms, self._plan.shape, row)
        rate = f"{row.streams / found * 1e3:.0f}" if found else UNMEASURED
        return row.streams, row.context, _ms(floor), _ms(row.target_ms, "none"), _ms(found), _share(floor, found), rate

    def prefill(self) -> Iterator[str]:
        """Yield the table of prompts."""
        rows: list[Line] = []
        for prompt in self._plan.prefill:
            found = self._ms("passes", prompt.name)
            floor = self._floor(Ceilings.prefill_ms, self._plan.shape, prompt)
            rows.append((prompt.tokens, _ms(floor), _ms(prompt.target_ms, "none"), _ms(found), _share(floor, found)))
        yield from _table("prompt | floor ms | target ms | ms | of the floor", rows)

    def verify(self) -> Iterator[str]:
        """Yield the table of steps that verify drafts, each compared with the first step with the same number of
        streams.
        """
        rows: list[Line] = []
        for row in self._plan.verify:
            one = self._ms("passes", names.verify(row, self._plan.verified[0]))
            for tokens in self._plan.verified:
                found = self._ms("passes", names.verify(row, tokens))
                floor = self._step_floor(row, tokens)
                rows.append((row.streams, row.context, tokens, _ms(found), _share(floor, found), _times(found, one)))
        yield from _table("streams | context | tokens of each | ms | of the floor | beside one token", rows)

    def launched(self) -> Iterator[str]:
        """Yield the table of decode steps without graphs."""
        rows: list[Line] = []
        for row in names.launched_rows(self._plan):
            found = self._ms("passes", names.launched(row))
            usual = self._ms("passes", row.name)
            rows.append(
                (row.streams, row.context, _ms(found), _share(self._step_floor(row), found), _times(found, usual))
            )
        yield from _table("without graphs, streams | context | ms | of the floor | beside graphs", rows)

    def serial(self) -> Iterator[str]:
        """Yield the table of decode steps without dependent launch."""
        rows: list[Line] = []
        for row in names.launched_rows(self._plan):
            found = self._ms("passes", names.serial(row))
            rows.append((row.streams, row.context, _ms(found), _times(found, self._ms("passes", row.name))))
        yield from _table("without dependent launch, streams | context | ms | beside dependent launch", rows)

    def mixtures(self) -> Iterator[str]:
        """Yield the table of models with experts."""
        rows: list[Line] = []
        plan = self._plan
        for shape in plan.mixtures:
            floors = [(row.name, self._floor(Ceilings.decode_ms, shape, row)) for row in plan.mixed_decode]
            floors.append((plan.mixed_prompt.name, self._floor(Ceilings.prefill_ms, shape, plan.mixed_prompt)))
            for name, floor in floors:
                ms = self._ms("mixtures", names.of_shape(shape, name))
                rows.append((shape.name, name, _ms(floor), _ms(ms), _share(floor, ms)))
        yield from _table("experts | step | floor ms | ms | of the floor", rows)

    def products(self) -> Iterator[str]:
        """Yield the table of a layer's products: time, share of the floor, and time beside 16-bit weights. The floor is
        the time to read the weight or to multiply with it, whichever is longer.
        """
        rows: list[Line] = []
        for case in names.product_cases(self._plan):
            found = self._results.get("products", case.name)
            plain = self._ms("products", names.ProductCase(case.product, names.PLAIN, case.rows).name)
            ms, floor = (None, None) if found is None else (found["ms"], self._product_floor(case, found["bytes"]))
            error = UNMEASURED if found is None else f"{found['error']:.1e}"
            rows.append((case.product, case.weights, case.rows, _ms(ms), _share(floor, ms), _times(ms, plain), error))
        yield from _table("product | weights | rows | ms | of the floor | beside 16 bits | error", rows)

    def _product_floor(self, case: names.ProductCase, num_bytes: int) -> float | None:
        if self._limits is None:
            return None
        out_features, in_features = names.product_shapes(self._plan.shape)[case.product]
        products = 2 * case.rows * out_features * in_features / self._limits.product_rate
        return max(num_bytes / self._limits.copy_rate, products) * 1e3

    def tiles(self) -> Iterator[str]:
        """Yield the fastest tile sizes of products, which belong into the device's file of tile sizes."""
        rows: list[Line] = []
        for bits in (8, 4):
            for count in self._plan.tuned:
                found = self._results.get("tiles", names.tuned(bits, count))
                best = UNMEASURED if found is None else found["best"]
                rows.append((bits, count, _ms(None if found is None else found["ms"]), best))
        yield from _table("tile sizes, bits | rows | ms of a layer | fastest", rows)

    def sampling(self) -> Iterator[str]:
        """Yield the table of the sampler alone, and of decode steps with filters, compared with greedy steps."""
        rows: list[Line] = []
        for count in self._plan.sampled:
            greedy = self._ms("sampling", names.sampled(count, "greedy"))
            for case in names.FILTERS:
                found = self._results.get("sampling", names.sampled(count, case))
                ms = None if found is None else found["ms"]
                differing = UNMEASURED if found is None else found["differing"]
                rows.append((case, count, _ms(ms), _times(ms, greedy), differing))
        yield from _table("sampler alone | rows | ms | beside greedy | tokens unlike the CPU's", rows)
        steps: list[Line] = []
        for row in names.launched_rows(self._plan):
            found_ms = self._ms("passes", names.filtered(row))
            steps.append((row.streams, row.context, _ms(found_ms), _times(found_ms, self._ms("passes", row.name))))
        yield from _table(f"decode with {names.FILTERED}, streams | context | ms | beside greedy", steps)

    def attention(self) -> Iterator[str]:
        """Yield the table of one layer's attention."""
        shape = self._plan.shape
        floors = [(row.name, self._floor(Ceilings.attention_ms, shape, row)) for row in self._plan.decode]
        for prompt in self._plan.prefill:
            floor = self._floor(Ceilings.scores_ms, shape, prompt)
            floors += [(prompt.name, floor), (names.by_library(prompt), floor)]
        rows: list[Line] = []
        for name, floor in floors:
            found = self._results.get("kernels", name)
            ms = None if found is None else found["ms"]
            error = UNMEASURED if found is None else f"{found['error']:.1e}"
            rows.append((name, _ms(floor), _ms(ms), _share(floor, ms), error))
        yield from _table("attention of one layer | floor ms | ms | of the floor | error", rows)

    def invariant(self) -> Iterator[str]:
        """Yield the table of the same steps with batch-invariant kernels."""
        shape = self._plan.shape
        floors = [(row.name, self._step_floor(row)) for row in self._plan.decode]
        floors += [(each.name, self._floor(Ceilings.prefill_ms, shape, each)) for each in self._plan.prefill]
        rows: list[Line] = []
        for name, floor in floors:
            found = self._results.get("invariant", name)
            ms = None if found is None else found["ms"]
            same = UNMEASURED if found is None else "yes" if found["same_bits"] else "NO"
            rows.append((name, _ms(ms), _share(floor, ms), _times(ms, self._ms("passes", name)), same))
        yield from _table("batch invariant | ms | of the floor | beside the default | same bits", rows)

    def adapted(self) -> Iterator[str]:
        """Yield a table of decode steps with adapters, each compared with the same streams without adapters."""
        rows: list[Line] = []
        for case in names.step_cases(self._plan):
            found = self._results.get("lora", case.name)
            ms, base = (None, None) if found is None else (found["ms"], found["base_ms"])
            cells = (
                case.adapters,
                case.row.streams,
                case.rank,
                _ms(ms),
                _share(self._step_floor(case.row), ms),
                _times(ms, base),
            )
            rows.append(cells)
        yield from _table("adapters | streams | rank | ms | of the floor of none | beside none", rows)

    def updates(self) -> Iterator[str]:
        """Yield the table of the shrink and expand kernels."""
        rows: list[Line] = []
        for case in names.update_cases(self._plan):
            found = self._results.get("lora", case.name)
            error = UNMEASURED if found is None else f"{found['error']:.1e}"
            rows.append(
                (case.product, case.rows, case.adapters, case.rank, _ms(None if found is None else found["ms"]), error)
            )
        yield from _table("updates of one product | rows | adapters | rank | ms | error", rows)

    def served(self) -> Iterator[str]:
        """Yield the table of engines and peers under load: time between tokens, and the lower bound of a step in the
        middle of the answers.
        """
        plan = self._plan
        rows: list[Line] = []
        named = [
            (name, "engine", names.engine(name, streams), streams)
            for streams in plan.engine_streams
            for name in names.TARGETS
        ]
        named += [(peer, "peers", peer, names.peer_streams(plan)) for peer in ("transformers", "vllm")]
        for name, phase, row, streams in named:
            found = self._results.get(phase, row)
            floor = self._step_floor(DecodeRow(streams, plan.input_len + plan.output_len // 2))
            ms = None if found is None else found.get("itl_ms", found.get("step_ms"))
            rate = UNMEASURED if found is None else f"{found['tokens_per_s']:.0f}"
            rows.append((name, streams, rate, _ms(ms), _share(floor, ms)))
        yield from _table("load | streams | tokens/s | ms a token | of the floor", rows)

    def mixed(self) -> Iterator[str]:
        """Yield the table of loads with different requests. Times between tokens are those of requests without grammar."""
        rows: list[Line] = []
        greedy = self._results.get("mixed", "greedy")
        for load in names.MIXED:
            found = self._results.get("mixed", load)
            if found is None:
                rows.append((load, *[UNMEASURED] * 6))
                continue
            beside = _times(found["itl_ms"], None if greedy is None else greedy["itl_ms"])
            ends = _ms(found["itl_ms"]), _ms(found["itl_p99_ms"]), _ms(found["ttft_ms"])
            rows.append((load, f"{found['tokens_per_s']:.0f}", *ends, beside, found["captured_while_serving"]))
        yield from _table("mixed load | tokens/s | ms a token | p99 | first token | beside greedy | captures", rows)

    def _floor(self, floor: Callable[..., float], *of: object) -> float | None:
        """Return a function that calls a method of ``Ceilings`` with ``of``."""
        return None if self._limits is None else floor(self._limits, *of)

    def _step_floor(self, row: DecodeRow, tokens: int = 1) -> float | None:
        return self._floor(Ceilings.decode_ms, self._plan.shape, row, tokens)

    def _ms(self, phase: str, row: str) -> float | None:
        found = self._results.get(phase, row)
        return None if found is None else found["ms"]


def _idle(results: Results) -> str:
    found = results.get("passes", names.IDLE)
    if found is None:
        return UNMEASURED
    return f"{found['idle']:.1%} at {found['streams']} streams, {found['launches']:.0f} launches a step"


def _start(results: Results) -> str:
    found = results.get("checkpoint", "start")
    if found is None:
        return f"Start from files: {UNMEASURED}."
    share = "" if "unused_share" not in found else f", {found['unused_share']:.1%} of its size are unused"
    return (
        f"Start from files: {found['s']:.0f} s, KV cache of {found['kv_cache_bytes'] / 2**30:.2f} GiB{share}, "
        f"{found['captured_while_serving']} graphs captured while serving."
    )


def _failures(results: Results) -> Iterator[str]:
    for (phase, row), record in results.errors.items():
        yield f"Failed: {phase}: {row}: {' '.join(record['error'].split())[:200]}"
    for (phase, row), reason in results.unrun.items():
        yield f"Not run: {phase}: {row}: {reason}"


def _table(head: str, rows: Iterable[Line]) -> Iterator[str]:
    yield ""
    yield f"| {head} |"
    yield "|---" * (head.count("|") + 1) + "|"
    for cells in rows:
        yield f"| {' | '.join(map(str, cells))} |"


def _ms(value: float | None, missing: str = UNMEASURED) -> str:
    return missing if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _share(floor: float | None, found: float | None) -> str:
    return UNMEASURED if floor is None or not found else f"{floor / found:.0%}"


def _times(found: float | None, base: float | None) -> str:
    return f"{found / base:.2f}x" if found and base else UNMEASURED
