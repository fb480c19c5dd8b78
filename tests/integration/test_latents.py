"""Models with latent attention (MLA) store latents in the KV cache, and give transformers' tokens."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore import app
from penstock_enginecore.attention.kv_cache import block_order
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.factory import make_executor
from penstock_enginecore.models.latent_hook import LatentHeads
from penstock_enginecore.structured_output.factory import make_grammar_backend
from tests.emulation.build import pretend
from tests.fakes.engines.in_process import Run, build_engine, config_of, generate
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_narrow_model, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens

LATENT, ROTATED = 48, 16
WIDE = {
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROTATED,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "hidden_size": 64,
}
"""Sizes that all CPU kernels support. Full keys and values would be four times ``32 + 32`` numbers."""
NEW_TOKENS = 12
LENGTHS = (1, 3, 7, 16, 34)
TIGHT = {"model": {"max_model_len": 46}, "scheduler": {"max_num_batched_tokens": 12}}
"""Settings with which prompts are computed in chunks. With few blocks, requests are preempted."""
slow = pytest.mark.slow
DECODERS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Model types that one kernel call per step computes."""
FAMILIES = (
    "deepseek_v3",
    *(pytest.param(name, marks=slow) for name in ("axk1", "deepseek_v2", "glm4_moe_lite", "minicpm3")),
)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


def expected(model: Any) -> list[list[int]]:
    return [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]


def greedy(engine: EngineCore, name: str = "r", order: int = 1) -> tuple[list[list[int]], Run]:
    """Return the tokens of all prompts, which are added in order if ``order`` is 1, or in reverse order if it is -1."""
    wanted = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    requests = [(f"{name}{i}", prompt, wanted) for i, prompt in enumerate(prompts())]
    run = generate(engine, requests[::order])
    return [run.tokens[f"{name}{i}"] for i in range(len(LENGTHS))], run


def computing(engine: EngineCore) -> str:
    [info] = engine.executor.collective_rpc("worker_info")
    return str(info["computing"])


def bytes_per_token(engine: EngineCore) -> int:
    return sum(spec.page_size_bytes // spec.block_size for spec in engine.executor.kv_cache_specs().values())


@pytest.mark.parametrize("kernels", [{}, {"isa": "off"}, {"decoder": False}], ids=["kernels", "torch", "modules"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_prefix_hits_and_preemptions_give_the_same_tokens(
    family: str, kernels: dict[str, Any], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    tokens = expected(save_tiny_model(family, tmp_path, **WIDE))
    engine = build_engine(tmp_path, cache={"num_blocks": 14}, kernels=kernels, **TIGHT)
    assert ("decoder" in computing(engine)) == (not kernels and family in DECODERS)
    assert bytes_per_token(engine) == 2 * (LATENT + ROTATED) * 4
    for turn in range(3):
        order = -1 if turn % 2 else 1
        found, run = greedy(engine, f"{turn} ", order)
        assert found == tokens, f"turn {turn}"
    assert run.stats.num_preemptions > 0
    assert run.stats.prefix_cache_hits > 0
    engine.shutdown()


@pytest.mark.parametrize("family", DECODERS)
def test_a_bfloat16_checkpoint_gives_the_tokens_of_float32(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tokens = expected(save_narrow_model(family, tmp_path, **WIDE))
    engine = build_engine(tmp_path, cache={"block_size": 16, "num_blocks": 64})
    assert "decoder" in computing(engine)
    assert greedy(engine)[0] == tokens
    assert greedy(engine, "again")[0] == tokens
    engine.shutdown()


@pytest.mark.parametrize(
    "shape",
    [{"q_lora_rank": None}, {"attention_bias": True}, {"num_attention_heads": 3, "num_key_value_heads": 3}],
    ids=str,
)
def test_decoders_of_other_shapes_give_the_same_tokens(shape: dict[str, Any], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tokens = expected(save_tiny_model("deepseek_v3", tmp_path, **WIDE, **shape))
    engine = build_engine(tmp_path, cache={"block_size": 16, "num_blocks": 64})
    assert "decoder" in computing(engine)
    assert greedy(engine)[0] == tokens
    engine.shutdown()


@pytest.mark.parametrize("family", DECODERS)
def test_the_decoder_and_the_modules_store_the_same_latents(family: str, tmp_path: Path) -> None:
    """Engines with and without the decoder exchange blocks, so both store rotated elements in the same order."""
    torch.set_num_threads(1)
    save_tiny_model(family, tmp_path, **WIDE)
    stored = []
    for kernels in ({}, {"decoder": False}, {"isa": "off"}):
        engine = build_engine(tmp_path, cache={"block_size": 16, "num_blocks": 8}, kernels=kernels)
        generate(engine, [("r", prompts()[-1], SamplingParams(temperature=0.0, max_tokens=1))])
        executor: Any = engine.executor
        caches = executor._worker.runner.caches
        assert block_order(caches) == "latents/1 float32"
        stored.append(torch.cat([layer.cache.keys[16 : 16 + LENGTHS[-1]] for layer in caches.values()]))
        engine.shutdown()
    for other in stored[1:]:
        torch.testing.assert_close(stored[0], other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_kernels_that_round_store_latents_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "avx512_bf16")
    torch.set_num_threads(1)
    save_narrow_model("deepseek_v3", tmp_path, **WIDE)
    dtype = {"dtype": "bfloat16"}
    engine = build_engine(
        tmp_path, model=dtype, cache={"block_size": 16, "num_blocks": 64}, kernels={"isa": "avx512_bf16"}
    )
    assert "avx512_bf16 kernels (decoder" in computing(engine)
    assert bytes_per_token(engine) == 2 * (LATENT + ROTATED) * 2
    first = greedy(engine)[0]
    assert greedy(engine, "again")[0] == first
    engine.shutdown()


def test_the_start_up_line_has_the_bytes_of_a_token(tmp_path: Path) -> None:
    save_tiny_model("minicpm3", tmp_path, **WIDE)
    lines: list[str] = []
    config = config_of(tmp_path, cache={"block_size": 16, "num_blocks": 20})
    engine = app.build_engine(config, make_executor(config), make_grammar_backend, lines.append)
    assert f"304 tokens in total, {2 * (LATENT + ROTATED) * 4} bytes per token" in lines[-1]
    engine.shutdown()


@pytest.mark.parametrize("sections", [{"speculative": {"method": "ngram"}}], ids=["n-grams"])
def test_drafts_do_not_change_tokens(sections: dict[str, Any], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tokens = expected(save_tiny_model("deepseek_v3", tmp_path, **WIDE))
    engine = build_engine(tmp_path, cache={"num_blocks": 40}, **sections)
    assert greedy(engine)[0] == tokens
    engine.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize(
    ("family", "changes"),
    [("deepseek_v3", {}), ("deepseek_v2", {"first_k_dense_replace": 2}), ("minicpm3", {})],
    ids=["whole attention", "dense", "modules"],
)
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_each_rank_has_the_latents_of_its_layers(
    split: str, family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    tokens = expected(save_tiny_model(family, tmp_path, **WIDE, **changes))
    engine = build_engine(tmp_path, executor={split: 2}, scheduler={"max_num_batched_tokens": 12})
    computed = engine.executor.collective_rpc("worker_info")
    assert changes == {} or all("decoder" in str(info["computing"]) for info in computed)
    layers = 2 if split == "tensor_parallel_size" else 1
    assert bytes_per_token(engine) == layers * (LATENT + ROTATED) * 4
    assert greedy(engine)[0] == tokens
    assert greedy(engine, "again")[0] == tokens
    engine.shutdown()


def test_an_fp8_cache_has_full_keys_and_values(tmp_path: Path) -> None:
    save_tiny_model("deepseek_v3", tmp_path, **WIDE)
    engine = build_engine(tmp_path, model={"attention_backend": "reference"}, cache={"dtype": "fp8"})
    assert bytes_per_token(engine) == 2 * 4 * (32 + 32)
    engine.shutdown()


def test_wrong_latents_are_found_before_they_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    tokens = expected(save_tiny_model("deepseek_v3", tmp_path, **WIDE))
    monkeypatch.setattr(LatentHeads, "expanded", lambda self, seen: seen[..., : self.value])  # reads no weights
    with caplog.at_level(logging.WARNING):
        engine = build_engine(tmp_path, cache={"block_size": 16, "num_blocks": 64})
    assert "caching full keys and values instead of latents" in caplog.text
    assert bytes_per_token(engine) == 2 * 4 * (32 + 32) * 4
    assert greedy(engine)[0] == tokens
    engine.shutdown()
