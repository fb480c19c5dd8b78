"""The fused decoder with the real kernels, interpreted: it gives the modules' results for prompts, chunks and tokens."""

import json
import os
import subprocess
import sys

import pytest
import torch

from penstock_enginecore.forward.cuda.kernel_api import GroupInputs
from tests.fakes.models.interpreted_kernels import NO_TRITON

FAMILIES = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt_oss/mxfp4", "qwen2/awq"),
    *("deepseek_v3", "qwen3_moe"),
)


@pytest.mark.slow
def test_families_are_proved_with_the_kernels_that_gpus_run() -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    command = [sys.executable, "-m", "tests.fakes.models.interpreted_proof", *FAMILIES]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(FAMILIES, "")


def test_scratch_memory_is_as_large_as_the_largest_batch_and_stays_for_captured_steps() -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

    kernels, out = TritonKernels(), torch.empty(4, 2, 8)

    def sizes(*requests: int) -> list[tuple[int, int]]:
        found = [kernels._scratch_for(count, 5, out) for count in requests]
        assert all(each.sums.shape == (len(each.total), 5, 2, 8) for each in found)
        return [(len(each.total), each.sums.data_ptr()) for each in found]

    (first, before), (second, grown), again = sizes(3, 40, 3)
    assert (first, second) == (16, 64)
    assert again == (64, grown)
    assert before != grown  # a captured graph still uses the first memory
    captured = kernels._scratch[(5, 2, 8, False)]
    assert [len(each.total) for each in captured] == [16, 64]
    assert [size for size, _ in sizes(600, 700, 1500)] == [1024, 1024, 2048]
    assert len(kernels._scratch[(5, 2, 8, True)]) == 1


def test_scratch_memory_has_rows_for_the_new_tokens_of_one_more_request() -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

    def rows(tokens: int, requests: int, *, decodes_only: bool = False, invariant: bool = False) -> int:
        group = GroupInputs(
            torch.empty(requests, 1),
            torch.empty(requests + 1),
            torch.empty(requests),
            torch.empty(tokens),
            decodes_only=decodes_only,
        )
        return TritonKernels(batch_invariant=invariant)._queries(torch.empty(tokens, 1, 1), group)

    assert rows(64, 64, decodes_only=True) == 64
    assert rows(40, 16) == 40
    assert rows(512, 64) == 192
    assert rows(2048, 512) == rows(2048, 450) == 512
    assert rows(2048, 600) == 600
    assert rows(512, 64, invariant=True) == 64
