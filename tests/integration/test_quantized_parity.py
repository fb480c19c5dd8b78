"""Greedy tokens of quantized checkpoints equal transformers' tokens with the dequantized weights in float32."""

import logging
from pathlib import Path

import pytest
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.models.fused_models import offer_fused
from tests.fakes.models.quantized_models import FORMATS, round_rows_to_float8, save_quantized_model
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens

pytestmark = pytest.mark.slow

NEW_TOKENS = 8
PROMPT_LENGTHS = (7, 34)
DENSE = [form for form in FORMATS if form != "mxfp4"]
EXPERTS = [
    ("qwen3_moe", "fp8-blocks"),
    ("qwen3_moe", "compressed-int4-asymmetric"),
    ("mixtral", "awq"),
    ("deepseek_v3", "fp8-blocks"),
    ("phi3", "gptq"),
]
GPT_OSS = {"hidden_size": 64}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def expected_tokens(model: torch.nn.Module) -> list[list[int]]:
    found = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]
    assert len({token for tokens in found for token in tokens}) > 4
    return found


def greedy(engine: EngineCore) -> list[list[int]]:
    wanted = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    run = generate(engine, [(f"r{i}", prompt, wanted) for i, prompt in enumerate(prompts())])
    engine.shutdown()
    return [run.tokens[f"r{i}"] for i in range(len(PROMPT_LENGTHS))]


def computing(engine: EngineCore) -> str:
    [info] = engine.executor.collective_rpc("worker_info")
    return str(info["computing"])


@pytest.mark.parametrize("form", DENSE)
def test_the_decoder_gives_the_tokens_of_what_the_weights_mean(form: str, tmp_path: Path) -> None:
    expected = expected_tokens(save_quantized_model("llama", form, tmp_path, hidden_size=64))
    engine = build_engine(tmp_path, cache={"block_size": 16})
    assert "decoder" in computing(engine)
    assert greedy(engine) == expected


@pytest.mark.parametrize(("architecture", "form"), EXPERTS)
def test_modules_and_merged_experts_give_them_as_well(architecture: str, form: str, tmp_path: Path) -> None:
    expected = expected_tokens(save_quantized_model(architecture, form, tmp_path, shards=3))
    assert greedy(build_engine(tmp_path, kernels={"isa": "off"})) == expected


def test_gpt_oss_gives_them_with_mxfp4_experts(tmp_path: Path) -> None:
    expected = expected_tokens(save_quantized_model("gpt_oss", "mxfp4", tmp_path, **GPT_OSS))
    assert greedy(build_engine(tmp_path)) == expected


def test_the_log_tells_what_memory_dequantized_weights_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized_model("llama", "awq", tmp_path, hidden_size=128)
    with caplog.at_level(logging.WARNING):
        build_engine(tmp_path).shutdown()
    # Each of the 2 layers has 5 x 128 x 64 and 2 x 128 x 64 weights. Attention has 4 query heads and 2 key-value heads.
    [line] = [record.getMessage() for record in caplog.records if "quantized" in record.getMessage()]
    assert "(AWQ, 4 bits, groups of 32)" in line
    assert "0.1 MiB in the files become 0.6 MiB in memory, as float32" in line


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        ("llama", "fp8-blocks"),
        ("qwen3_moe", "fp8-blocks"),
        ("phi3", "compressed-fp8-tensor"),
        ("llama", "awq"),
        ("qwen2", "compressed-int4-asymmetric"),
        ("phi3", "gptq"),
        ("qwen3_moe", "compressed-int4-asymmetric"),
        ("mixtral", "fbgemm"),
        ("gpt_oss", "mxfp4"),
        ("deepseek_v3", "fp8-blocks"),
    ],
)
def test_the_fused_decoder_gives_them_with_weights_that_stay_quantized(
    architecture: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer_fused(monkeypatch)
    # Rows of fp8 weights have multiples of 32 columns.
    sizes = {"q_lora_rank": 32, "v_head_dim": 16} if architecture == "deepseek_v3" else {}
    expected = expected_tokens(save_quantized_model(architecture, form, tmp_path, hidden_size=64, **sizes))
    with caplog.at_level(logging.INFO):
        engine = build_engine(tmp_path)
    assert "fused decoder" in computing(engine)
    assert "keep their quantized weights" in caplog.text
    assert "dequantized" not in caplog.text
    assert greedy(engine) == expected


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_fused_decoder_gives_them_with_experts_that_are_rounded_at_load(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_fused(monkeypatch)
    monkeypatch.setattr("penstock_enginecore.executor.loading.check_float8", lambda *_: None)  # it refuses CPUs
    sizes = {"q_lora_rank": 32, "v_head_dim": 16} if architecture == "deepseek_v3" else {}
    model = save_tiny_model(architecture, tmp_path, hidden_size=64, **sizes)
    dense = expected_tokens(model)
    round_rows_to_float8(model)
    expected = expected_tokens(model)
    assert expected != dense
    engine = build_engine(tmp_path, model={"quantization": "fp8"})
    assert "fused decoder" in computing(engine)
    assert greedy(engine) == expected
