"""LoRA adapters on a device.

The checks compare greedy tokens of mixed batches with PEFT's tokens, and logits alone with logits in a batch.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import answer, build_engine
from tests.fakes.models.adapted_steps import linear_layers
from tests.fakes.models.adapters import save_adapter
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens

NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 3, 7, 16, 34, 90, 12, 12)
WIDTHS = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
_CACHE = {"block_size": 16, "num_blocks": 256}
_UNSERVED = ("mlp.", "kv_b_proj")
"""DeepSeek modules that adapters cannot have: experts, and projections that are absorbed in the latent attention."""


def mixed(architecture: str, dtype: str, device: str) -> dict[str, Any]:
    """Compare requests of the base model and of three adapters with PEFT, twice.

    The adapters have different ranks and only two slots. Requests of the base model are also compared with an engine
    without adapters. In float32, all tokens must equal PEFT's.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        model = save_tiny_model(architecture, path, **WIDTHS)
        layers = [name for name in linear_layers(model) if name != "lm_head" and name != "embed_out"]
        if architecture == "deepseek_v3":
            layers = [name for name in layers if not any(part in name for part in _UNSERVED)]
        adapters = [str(Path(folder) / f"adapter{i}") for i in range(3)]
        adapted = [
            save_adapter(model, Path(each), seed=i, r=4 * i + 3, target_modules=layers)
            for i, each in enumerate(adapters)
        ]
        expected = [greedy_tokens([model, *adapted][i % 4], prompt, NEW_TOKENS) for i, prompt in enumerate(_prompts())]
        plain = _tokens(_engine(path, device, dtype), "plain", [])
        engine = _engine(path, device, dtype, lora={"max_loras": 2, "max_wait": 0.0})
        found, again = (_tokens(engine, name, adapters) for name in ("first", "again"))
        [stats] = engine.executor.worker_stats()
        [info] = engine.executor.collective_rpc("worker_info")
        engine.shutdown()
    exact = found == expected and again == expected
    same = [_same(each, expected) for each in (found, again)]
    base = all(found[i] == plain[i] for i in range(0, len(plain), 4))
    ok = exact and base if dtype == "float32" else min(same) > 0.5
    says = f"{same} of PEFT's, base as without: {base}, {info['computing']}, {stats.graphs}"
    return {"ok": ok, "same": exact, "says": says}


def alone(device: str) -> dict[str, Any]:
    """Compare tokens sampled alone and in a batch, with batch-invariant kernels in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        model = save_tiny_model("llama", path, **WIDTHS, head_dim=64)
        adapters = [str(Path(folder) / f"adapter{i}") for i in range(3)]
        for i, each in enumerate(adapters):
            save_adapter(model, Path(each), seed=i, r=8 + 8 * i)
        engine = _engine(path, device, "bfloat16", kernels={"batch_invariant": True}, lora={"max_loras": 3})
        drawn = {"temperature": 1.0, "seed": 3}
        crowd = _tokens(engine, "crowd", adapters, **drawn)
        apart = [_tokens(engine, f"alone{i}", adapters, only=i, **drawn)[0] for i in range(len(PROMPT_LENGTHS))]
    return {"ok": crowd == apart, "says": f"{_same(crowd, apart):.0%} the same alone"}


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def _engine(path: Path, device: str, dtype: str, **sections: Any) -> EngineCore:
    return build_engine(path, model={"device": device, "dtype": dtype}, cache=_CACHE, **sections)


def _tokens(
    engine: EngineCore, name: str, adapters: Sequence[str], *, only: int | None = None, **params: Any
) -> list[list[int]]:
    """Return the tokens of the prompts, with no adapter and each of ``adapters`` in turn. ``only`` selects a single
    prompt.
    """
    wanted = SamplingParams(**{"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True} | params)
    requests = [
        EngineCoreRequest(
            request_id=f"{name}{i}",
            prompt_token_ids=prompt,
            sampling_params=wanted,
            lora=LoraAdapter(adapters[i % 4 - 1], adapters[i % 4 - 1], b"") if adapters and i % 4 else None,
        )
        for i, prompt in enumerate(_prompts())
        if only in (None, i)
    ]
    run = answer(engine, requests)
    return [run.tokens[request.request_id] for request in requests]


def _same(found: list[list[int]], expected: list[list[int]]) -> float:
    """Return the fraction of tokens before the first difference of each request."""
    count = 0
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            if x != y:
                break
            count += 1
    return count / sum(map(len, expected))
