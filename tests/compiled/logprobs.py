"""Kernels of log-probabilities and grammar masks, for the vocabularies of published models."""

from collections.abc import Iterator

from penstock_enginecore.forward.cuda.kernel_api import MAX_SCORED
from penstock_enginecore.forward.cuda.kernels import logprobs, mask
from tests.compiled.kernel import Kernel

VOCABULARIES = {"Llama 3": 128_256, "Gemma 3": 262_208, "Mistral 7B": 32_768}
_ARGUMENTS: dict[str, str | None] = {
    "chosen": "*i64", "peaks": "*fp32", "sums": "*fp32", "likelier": "*i32", "values": "*fp32", "found_columns": "*i32",
    "packed": "*i32", "rows": "i32", "vocab": "i32", "parts": "i32",
}  # fmt: skip
_ALIGNED = frozenset({"logits", "chosen", "peaks", "sums", "likelier", "values", "found_columns", "packed"})


def kernels() -> Iterator[Kernel]:
    """Yield the kernels of all vocabularies, in the dtypes of models."""
    for dtype in ("bf16", "fp16", "fp32"):
        for name in VOCABULARIES:
            for count in (0, MAX_SCORED):
                yield from _both(name, dtype, count)
    yield _mask()


def gate() -> Iterator[Kernel]:
    """Yield the kernels of one vocabulary."""
    yield from _both("Llama 3", "bf16", MAX_SCORED)
    yield _mask()


def _mask() -> Kernel:
    arguments = {"logits": "*fp32", "rows": "*i64", "words": "*i32", "vocab": "i32", "num_words": "i32"}
    aligned = frozenset({"logits", "rows", "words"})
    return Kernel("masks of rows", mask.mask_rows, {**arguments}, {"PART": mask.PART}, aligned, mask.WARPS)


def _both(name: str, dtype: str, count: int) -> Iterator[Kernel]:
    arguments = {**_ARGUMENTS, "logits": f"*{dtype}"}
    of_parts, of_rows = logprobs.constants(VOCABULARIES[name], count)
    kind = f"{name}, {count} likeliest, {dtype}"
    yield Kernel(f"scores of parts, {kind}", logprobs.score_parts, arguments, of_parts, _ALIGNED, logprobs.WARPS)
    yield Kernel(f"scores of rows, {kind}", logprobs.score_rows, arguments, of_rows, _ALIGNED)
