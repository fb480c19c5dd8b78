"""The fused decoder with the real kernels, interpreted: it gives the modules' results for prompts, chunks and tokens."""

import json
import os
import subprocess
import sys

import pytest

from tests.fakes.models.interpreted_kernels import NO_TRITON

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt_oss/mxfp4", "qwen2/awq", "deepseek_v3")


@pytest.mark.slow
def test_families_are_proved_with_the_kernels_that_gpus_run() -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    command = [sys.executable, "-m", "tests.fakes.models.interpreted_proof", *FAMILIES]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(FAMILIES, "")
