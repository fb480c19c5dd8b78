"""transformers' own ``generate`` on the same model, as one batch, as a baseline without a server."""

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks.load import Load, Result, prompts

_model: Any = None


class TransformersGenerate:
    """Greedy generation with a fixed output length, in a separate process.

    A second pool of OpenMP threads in the engine's process would slow both down, because libgomp stops spinning once a
    process has more threads than there are cores.
    """

    def __init__(self, model: str, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, mp_context=spawn, initializer=_load, initargs=(model, threads))

    def run(self, load: Load, *, seed: int) -> Result:
        """Run batches of ``streams`` prompts until all requests are done. The TTFT is the prefill time of a batch."""
        return self._process.submit(_run, load, seed).result()

    def close(self) -> None:
        """End the process."""
        self._process.shutdown()


def _load(model: str, threads: int) -> None:
    global _model
    torch.set_num_threads(threads)
    _model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def _run(load: Load, seed: int) -> Result:
    batch = prompts(load, _model.config.vocab_size, seed=seed)
    first, start = [], time.perf_counter()
    for at in range(0, load.requests, load.streams):
        piece = torch.tensor(batch[at : at + load.streams])
        stamps = _Stamps()
        began = time.perf_counter()
        _model.generate(
            piece,
            attention_mask=torch.ones_like(piece),
            max_new_tokens=load.output_len,
            min_new_tokens=load.output_len,
            do_sample=False,
            logits_processor=[stamps],
            pad_token_id=0,
        )
        first.append(stamps.times[0] - began)
    seconds = time.perf_counter() - start
    gaps = [b - a for a, b in zip(stamps.times, stamps.times[1:], strict=False)]
    return Result(
        tokens_per_s=load.requests * load.output_len / seconds,
        ttft_ms=statistics.median(first) * 1e3,
        itl_ms=statistics.median(gaps) * 1e3,
    )


class _Stamps:
    """Logits processor that records the time of each call. It is called once per generated token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores
