"""Names of rows, shared by the phases, which import torch, and the report, which does not."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from tests.benchmarks.gpu.shapes import Ceilings, DecodeRow, ModelShape, Plan, Prefill
from tests.device.records import Results

IDLE = "idle"
IN_PROCESS, OVER_GRPC = TARGETS = "in-process", "over gRPC"
COMPUTING = ("passes", "invariant", "lora", "mixtures", "engine")
"""Phases whose rows record the kernels that computed them."""
PEER_STREAMS = 32
"""Number of streams for which the targets compare servers."""


def verify(row: DecodeRow, tokens: int) -> str:
    """Return the name of a step with several tokens of each stream."""
    return f"verify {row.streams} x {row.context}, {tokens} tokens"


def launched(row: DecodeRow) -> str:
    """Return the name of a decode step without graphs."""
    return f"launched {row.streams} x {row.context}"


def by_library(prompt: Prefill) -> str:
    """Return the name of a prompt whose attention cuDNN computes."""
    return f"{prompt.name} by cuDNN"


def serial(row: DecodeRow) -> str:
    """Return the name of a decode step without dependent launch."""
    return f"no dependent launch {row.streams} x {row.context}"


class Filters(NamedTuple):
    """Sampling parameters of all rows of a step."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


FILTERS = {
    "greedy": Filters(temperature=0.0),
    "temperature": Filters(),
    "top_p": Filters(top_p=0.95),
    "top_k": Filters(top_k=20),
    "top_p and top_k": Filters(top_p=0.95, top_k=20),
    "min_p": Filters(min_p=0.1),
}
"""Measured combinations of filters, by name."""
FILTERED = "top_p and top_k"
"""The combination that the generation settings of most models have."""


def sampled(rows: int, case: str) -> str:
    """Return the name of a measurement of the sampler alone."""
    return f"{rows} rows, {case}"


def filtered(row: DecodeRow) -> str:
    """Return the name of a decode step with ``FILTERED``."""
    return f"{FILTERED} {row.streams} x {row.context}"


class Mix(NamedTuple):
    """Requests of a load: the filters of all requests, and which have grammars or log-probabilities.

    ``grammars`` is a number of streams from 1 on, or else a fraction of the requests. ``logprobs`` is a fraction.
    """

    filters: Filters = FILTERS["greedy"]
    grammars: float = 0.0
    logprobs: float = 0.0


MIXED = {
    "greedy": Mix(),
    "one grammar": Mix(grammars=1),
    "filters": Mix(FILTERS[FILTERED]),
    "all kinds": Mix(FILTERS[FILTERED], grammars=0.1, logprobs=0.1),
}
"""Measured loads of different requests, by name."""


def of_shape(shape: ModelShape, row: str) -> str:
    """Return the name of a row that is measured with a shape other than the plan's."""
    return f"{shape.name}: {row}"


def idle_row(plan: Plan) -> DecodeRow:
    """Return the decode step whose number of streams is closest to 64. The idle time is measured for this step."""
    return min(plan.decode, key=lambda each: (abs(each.streams - 64), each.context))


def launched_rows(plan: Plan) -> list[DecodeRow]:
    """Return the decode steps that also run without graphs or dependent launch: the first step, and the step of ``idle_row``."""
    return list(dict.fromkeys((plan.decode[0], idle_row(plan))))


def engine(target: str, streams: int) -> str:
    """Return the name of an engine under load."""
    return f"{target}, {streams} streams"


def peer_streams(plan: Plan) -> int:
    """Return the number of concurrent streams for peers."""
    return min(PEER_STREAMS, max(plan.engine_streams))


@dataclass(frozen=True)
class StepCase:
    """A decode step with adapters."""

    row: DecodeRow
    adapters: int
    rank: int

    @property
    def name(self) -> str:
        """Return the name of the row."""
        return f"{self.row.name}, {self.adapters} of rank {self.rank}"


@dataclass(frozen=True)
class UpdateCase:
    """The two kernels of a product, for some rows."""

    product: str
    rows: int
    adapters: int
    rank: int

    @property
    def name(self) -> str:
        """Return the name of the row."""
        return f"{self.product}, {self.rows} rows, {self.adapters} of rank {self.rank}"


def products(shape: ModelShape) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the products of a layer by name: rows and columns of each matrix."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    hidden, inner = shape.hidden, shape.intermediate
    return {
        "qkv": {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)},
        "output": {"o": (hidden, queries)},
        "gate_up": {"gate": (inner, hidden), "up": (inner, hidden)},
        "down": {"down": (hidden, inner)},
    }


PLAIN = "16 bits"
FORMATS = (PLAIN, "fp8", "fp8 by 128", "int4")
"""Formats of weights whose products are measured: 16-bit floats, fp8 with scales by row or by 128 columns, and 4-bit
integers in groups of 128.
"""


@dataclass(frozen=True)
class ProductCase:
    """A product of a layer with weights in one of ``FORMATS``."""

    product: str
    weights: str
    rows: int

    @property
    def name(self) -> str:
        """Return the name of the row."""
        return f"{self.product}, {self.weights}, {self.rows} rows"


def product_shapes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of each product of a layer, whose matrices with the same input are joined."""
    return {
        name: (sum(rows for rows, _ in layers.values()), next(iter(layers.values()))[1])
        for name, layers in products(shape).items()
    }


def product_cases(plan: Plan) -> list[ProductCase]:
    """Return the measured products of a plan."""
    every = itertools.product(plan.product_rows, FORMATS, products(plan.shape))
    return [ProductCase(product, weights, rows) for rows, weights, product in every]


def tuned(bits: int, rows: int) -> str:
    """Return the name of a search for tile sizes."""
    return f"{bits} bits, {rows} rows"


def tiles(block_n: int, warps: int, stages: int) -> str:
    """Return the name of a tile size."""
    return f"block_n {block_n}, warps {warps}, stages {stages}"


def step_cases(plan: Plan) -> list[StepCase]:
    """Return the steps with adapters of a plan."""
    every = itertools.product(plan.adapted, plan.ranks, plan.adapters)
    return [StepCase(row, adapters, rank) for row, rank, adapters in every if adapters <= row.streams]


def update_cases(plan: Plan) -> list[UpdateCase]:
    """Return the updates of single products of a plan."""
    rows = sorted({row.streams for row in plan.adapted} | {each.tokens for each in plan.prefill[:1]})
    every = itertools.product(products(plan.shape), plan.ranks, plan.adapters, rows)
    return [UpdateCase(product, count, adapters, rank) for product, rank, adapters, count in every if count >= adapters]


def ceilings(results: Results) -> Ceilings | None:
    """Return the measured rates of the device, or None if a rate is missing."""
    copy, product = results.get("ceilings", "copy"), results.get("ceilings", "product")
    return None if copy is None or product is None else Ceilings(copy["rate"], product["rate"])
