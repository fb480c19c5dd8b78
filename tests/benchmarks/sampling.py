"""Time of the sampler per step and feature, without a model: the input is random logits."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.core.scheduler.output import GrammarBitmask, NewRequestData, SchedulerOutput
from penstock_enginecore.executor.generation.input_batch import InputBatch
from penstock_enginecore.executor.generation.step_sampling import OutputScores
from penstock_enginecore.native.backend import open_backend
from penstock_enginecore.sample.base import Sampler
from penstock_enginecore.sample.sampler import TorchSampler

ROWS, VOCAB, PROMPT_LEN = 64, 128_256, 1000
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
FEATURES: dict[str, Mapping[str, Any]] = {
    "greedy": GREEDY,
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_k 500": {"top_k": 500},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "greedy, min_tokens": {**GREEDY, "min_tokens": 10, "stop_token_ids": (7,)},
    "greedy, bias of 300 tokens": {**GREEDY, "logit_bias": dict.fromkeys(range(0, 30_000, 100), 1.0)},
    "greedy, 1000 allowed tokens": {**GREEDY, "allowed_token_ids": tuple(range(0, 100_000, 100))},
    "greedy, 1000 bad words": {**GREEDY, "bad_word_token_ids": tuple((i, i + 1) for i in range(1000))},
    "greedy, penalties": {**GREEDY, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "greedy, grammar": {**GREEDY, "grammar": True},
    "greedy, logprobs 0": {**GREEDY, "logprobs": 0},
    "greedy, logprobs 20": {**GREEDY, "logprobs": 20},
}
DISTRIBUTIONS = {"peaked": 8.0, "flat": 1.0}
"""Standard deviations of the random logits. Of the flat ones, top_p 0.9 keeps about fifty thousand tokens."""


def measure(threads: int, rounds: int = 5) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each feature with the median milliseconds per step, by distribution."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(ROWS, VOCAB, generator=generator)
        for name, params in FEATURES.items():
            yield name, {kind: _median(noise * scale, params, rounds) for kind, scale in DISTRIBUTIONS.items()}
    finally:
        torch.set_num_threads(before)


def _median(logits: torch.Tensor, params: Mapping[str, Any], rounds: int) -> float:
    step = _step(params, _sampler())
    times = []
    for number in range(rounds + 1):
        own = logits.clone()
        began = time.perf_counter()
        step(own)
        if number:
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def _sampler() -> Sampler:
    """Return a sampler with the kernels and torch's number of threads, as in the engine."""
    native = open_backend(KernelsConfig(), torch.device("cpu"), torch.get_num_threads())
    return TorchSampler(None if native is None else native.sampling())


def _step(params: Mapping[str, Any], sampler: Sampler) -> Callable[[torch.Tensor], None]:
    """Return the worker's sampling function for the logits of a step of ``ROWS`` requests."""
    batch = InputBatch(max_model_len=2 * PROMPT_LEN, block_size=16, num_groups=1, eos_token_ids=frozenset({2}))
    ids = [str(i) for i in range(ROWS)]
    given = {name: value for name, value in params.items() if name != "grammar"}
    random = np.random.default_rng(0)
    batch.update(
        SchedulerOutput(
            new_requests=[
                NewRequestData(
                    request_id=request_id,
                    token_ids=random.integers(0, VOCAB, PROMPT_LEN).tolist(),
                    num_prompt_tokens=PROMPT_LEN,
                    num_computed_tokens=0,
                    block_ids=([],),
                    sampling_params=SamplingParams(seed=seed, **given),
                )
                for seed, request_id in enumerate(ids)
            ]
        )
    )
    words = random.integers(0, 2**32, (ROWS, -(-VOCAB // 32)), dtype=np.uint32).view(np.int32)
    mask = GrammarBitmask(ids, words) if "grammar" in params else None

    def step(logits: torch.Tensor) -> None:
        inputs = batch.sampling_inputs(ids, mask)
        wanted = batch.logprobs(ids)
        scores = OutputScores.of(logits, wanted, overwritten=bool(inputs.rules))
        sampled = sampler.sample(logits, inputs)
        scores.logprobs(ids, sampled.token_ids)
        batch.append_tokens(ids, sampled.token_ids)

    return step
