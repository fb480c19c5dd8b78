"""The checks of ``make check-gpu``. Each check takes a device and returns its findings: ``ok``, and a description in
``says``.
"""

import logging
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from tests.device.adapters import alone, mixed
from tests.device.float8 import activations, rounded_mixture
from tests.device.speculation import speculation, speeds
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.models.tiny_models import ARCHITECTURES, RECURRENT_ARCHITECTURES, VOCAB_SIZE, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens

NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 3, 7, 16, 34, 90)
CACHE = {"block_size": 16, "num_blocks": 256}
LORA = ("llama", "gemma3", "deepseek_v3", "gpt_neox")
"""Model types whose adapters are checked. Three types use the fused decoder, and one type runs with its modules."""
LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")
WIDTHS = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
HEADS = {**WIDTHS, "head_dim": 64}


def _widths(architecture: str) -> dict[str, Any]:
    """Return configuration changes for heads of 64 numbers, if the model type has a configurable head size."""
    if architecture in LATENT:
        return WIDTHS
    if architecture in RECURRENT_ARCHITECTURES:
        return {}
    return HEADS if architecture not in ("gpt2", "gpt_bigcode", "opt", "jetmoe", "helium", "minicpm3") else {}


def prompts() -> list[list[int]]:
    """Return the prompts, which are the same on every machine."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


class Said(logging.Handler):
    """Log handler that collects the engine's log lines about its kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store log lines about kernels."""
        text = record.getMessage()
        if "computing with" in text or record.levelno >= logging.WARNING:
            self.lines.append(text)


def _said() -> Said:
    said = Said()
    logger = logging.getLogger("penstock_enginecore")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    return said


def _engine(path: Path, device: str, dtype: str = "float32", **sections: Any) -> EngineCore:
    model = {"device": device, "dtype": dtype}
    return build_engine(path, model=model, cache={**CACHE, **sections.pop("cache", {})}, **sections)


def _tokens(engine: EngineCore, name: str = "r", **params: Any) -> list[list[int]]:
    wanted = SamplingParams(**{"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True} | params)
    run = generate(engine, [(f"{name}{i}", prompt, wanted) for i, prompt in enumerate(prompts())])
    return [run.tokens[f"{name}{i}"] for i in range(len(PROMPT_LENGTHS))]


def _graphs(engine: EngineCore) -> str:
    [stats] = engine.executor.worker_stats()
    return str(stats.graphs)[:120]


def _same(found: list[list[int]], expected: list[list[int]]) -> str:
    """Return the number of tokens that are equal before the first difference in each prompt."""
    count = 0
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            if x != y:
                break
            count += 1
    return f"{count}/{sum(map(len, expected))}"


def family(architecture: str, dtype: str, device: str) -> dict[str, Any]:
    """Compare greedy tokens with transformers in float32: prompts in one step, in chunks and with prefix hits."""
    said = _said()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        model = save_tiny_model(architecture, path, **_widths(architecture))
        expected = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]
        engine = _engine(path, device, dtype, scheduler={"max_num_batched_tokens": 40})
        found = _tokens(engine)
        again = _tokens(engine, "again")
        graphs = _graphs(engine)
        engine.shutdown()
    same = found == expected and again == expected
    computing = next((line for line in said.lines if "computing with" in line), "?")
    ok = same or (dtype != "float32" and found == again)
    says = f"{_same(found, expected)} {_same(again, expected)} {computing.replace('computing with ', '')}"
    found_by = {"computing": computing} if architecture in FUSED else {}
    return {"ok": ok, "same": same, "says": says, "log": said.lines, "graphs": graphs, **found_by}


def draws(device: str) -> dict[str, Any]:
    """Compare seeded tokens, with and without filters, with a CPU's."""
    share = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_tiny_model("llama", path, **HEADS)
        for name, params in {
            "plain": {"temperature": 1.0, "seed": 7},
            "filters": {"temperature": 0.8, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
            "penalties": {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        }.items():
            here, there = (_tokens(_engine(path, where), **params) for where in (device, "cpu"))
            same, of = map(int, _same(here, there).split("/"))
            share[name] = same / of
    return {"ok": min(share.values()) > 0.9, "says": str(share)}


def invariant(device: str) -> dict[str, Any]:
    """Compare log-probabilities alone and in a batch, bit by bit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_tiny_model("llama", path, **HEADS)
        engine = _engine(path, device, "bfloat16", kernels={"batch_invariant": True})
        crowd = _tokens(engine, "crowd", temperature=1.0, seed=3)
        wanted = SamplingParams(temperature=1.0, seed=3, max_tokens=NEW_TOKENS, ignore_eos=True)
        alone = [
            generate(engine, [(f"alone{i}", prompt, wanted)]).tokens[f"alone{i}"] for i, prompt in enumerate(prompts())
        ]
    return {"ok": crowd == alone, "says": _same(crowd, alone)}


def sleeps(device: str, keep_addresses: bool = False) -> dict[str, Any]:
    """Compare tokens before and after a sleep of level 1 and of level 2.

    With ``keep_addresses``, a GPU must also free memory during the sleep, and keep its graphs.
    """
    said = _said()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_tiny_model("llama", path, **HEADS)
        engine = _engine(path, device, "bfloat16", executor={"keep_addresses": keep_addresses})
        before = _tokens(engine, "before")
        control, found, free, graphs = EngineControl(engine), [], [_free(device)], [_captured(engine)]
        for level in (1, 2):
            control.sleep(level)
            free.append(_free(device))
            control.wake_up([])
            graphs.append(_captured(engine))
            found.append(_tokens(engine, f"after{level}") == before)
        engine.shutdown()
    ok = all(found)
    if keep_addresses and device == "cuda":
        kept = not any("keep_addresses has no effect" in line for line in said.lines)
        ok = ok and kept and graphs[0] > 0 and set(graphs) == {graphs[0]} and min(free[1:]) > free[0]
    return {"ok": ok, "says": f"{found}, MiB free awake and asleep {free}, graphs {graphs}", "log": said.lines}


def _free(device: str) -> int:
    """Return the free device memory in MiB, or 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] // 2**20 if device == "cuda" else 0


def _captured(engine: EngineCore) -> int:
    [stats] = engine.executor.worker_stats()
    return stats.graphs.captured


def eight_bits(device: str) -> dict[str, Any]:
    """Check that most tokens with an 8-bit KV cache equal the tokens with the default cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_tiny_model("llama", path, **HEADS)
        plain = _tokens(_engine(path, device, "bfloat16"))
        eight = _tokens(_engine(path, device, "bfloat16", cache={"dtype": "fp8"}))
    same = _same(eight, plain)
    return {"ok": int(same.split("/")[0]) > 0.3 * 72, "says": same}


def recorded(device: str, architecture: str = "llama", dtype: str = "float32") -> dict[str, Any]:
    """Check that graphs captured at the start give the same tokens, and that a GPU captured them.

    Tokens of other dtypes than float32 are compared only between two runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        model = save_tiny_model(architecture, path, **_widths(architecture))
        engine = _engine(path, device, dtype, kernels={"capture_at_start": True}, scheduler={"max_num_seqs": 16})
        expected = (
            [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]
            if dtype == "float32"
            else _tokens(engine, "before")
        )
        found, captured = _tokens(engine), _captured(engine)
        says = f"{_same(found, expected)} {_graphs(engine)}"
    return {"ok": found == expected and (captured > 0 or device == "cpu"), "says": says}


FUSED = (
    *("llama", "deepseek_v3", "gpt_oss", "gemma3", "qwen3_moe", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"),
    *("granite", "ministral", "seed_oss", "mixtral", "deepseek_v2", "glm4_moe_lite"),
)
"""Architectures that the fused decoder supports."""

DRAFTERS = ("ngram", "suffix", "draft_model", "eagle3")

CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {
    **{f"float32 {name}": partial(family, name, "float32") for name in FUSED},
    "draws": draws,
    "invariant": invariant,
    **{f"lora float32 {name}": partial(mixed, name, "float32") for name in LORA},
    **{f"lora bfloat16 {name}": partial(mixed, name, "bfloat16") for name in LORA[:1]},
    "lora alone": alone,
    "sleeps": sleeps,
    "sleeps with kept addresses": partial(sleeps, keep_addresses=True),
    "eight_bits": eight_bits,
    "fp8 activations": activations,
    "fp8 mixture": rounded_mixture,
    "recorded": recorded,
    "recorded mixtral": partial(recorded, architecture="mixtral"),
    "recorded qwen3_moe float16": partial(recorded, architecture="qwen3_moe", dtype="float16"),
    **{f"drafts {method} {heat}": partial(speculation, method, heat) for method in DRAFTERS for heat in (0.0, 0.8)},
    "speeds with drafts": speeds,
    **{f"bfloat16 {name}": partial(family, name, "bfloat16") for name in FUSED[:6]},
    **{f"float32 {name}": partial(family, name, "float32") for name in RECURRENT_ARCHITECTURES},
    **{f"float32 {name}": partial(family, name, "float32") for name in ARCHITECTURES if name not in FUSED},
}
