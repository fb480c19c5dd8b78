"""Contents of a request's KV cache blocks never reach another request: complete models with the real scheduler."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.generation.drafting import Drafting
from penstock_enginecore.executor.generation.runner import GenerationRunner
from tests.fakes.engines.in_process import CLIENT, build_engine, generate
from tests.fakes.engines.known_drafter import KINDS, KnownDrafter
from tests.fakes.engines.poisoned_pool import PoisonedPool
from tests.fakes.engines.poisoned_states import PoisonedStates
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model

pytestmark = pytest.mark.slow

NEW_TOKENS = 24
# Fused decoders with full and with windowed layers, mixed layer kinds, soft caps, sinks, chunked attention, and
# multi-head latent attention, heads of two shapes, and layers that share keys and values.
FAMILIES = (
    *("llama", "mistral", "gemma2", "gpt_oss", "llama4_text", "deepseek_v3"),
    *("gemma3n", "gemma4", "gemma4_shared"),
)
RECURRENT = (
    *("qwen3_5", "qwen3_5_moe", "granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2", "mamba2"),
    *("bailing_hybrid", "falcon_mamba", "jamba", "kimi_linear", "mamba"),
)
WITHOUT_ATTENTION = ("falcon_mamba", "mamba", "mamba2")
LAYER_NORM = "starcoder2"
"""Model type with a window, whose norms turn very large vectors into NaN."""
LARGEST = float(torch.finfo(torch.float32).max)
HIDDEN = 64


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (1, 20, 45)]


def greedy(engine: EngineCore, name: str) -> list[list[int]]:
    wanted = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    run = generate(engine, [(f"{name}{i}", prompt, wanted) for i, prompt in enumerate(prompts())])
    return [run.tokens[f"{name}{i}"] for i in range(len(prompts()))]


def spy_on_logits(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    seen: list[bytes] = []
    sample = GenerationRunner.sample

    def spy(self: GenerationRunner, grammar: Any = None) -> Any:
        if self._pending is not None:
            seen.append(self._pending.logits.numpy().tobytes())
        return sample(self, grammar)

    monkeypatch.setattr(GenerationRunner, "sample", spy)
    return seen


@pytest.mark.parametrize(("backend", "block_size"), [("auto", 16), ("auto", 4), ("reference", 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_to_the_last_bit_in_a_pool_full_of_nan(
    family: str, backend: str, block_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs chunked prompts mixed with decodes, and then the same prompts with cached prefixes."""
    torch.set_num_threads(1)
    save_tiny_model(family, tmp_path, hidden_size=HIDDEN)
    logits = spy_on_logits(monkeypatch)
    runs = []
    for poisoned in (False, True):
        engine = build_engine(
            tmp_path,
            model={"attention_backend": backend},
            cache={"block_size": block_size, "num_blocks": 256},
            scheduler={"max_num_batched_tokens": 17},
        )
        pool = PoisonedPool(engine) if poisoned else None
        logits.clear()
        tokens = [greedy(engine, name) for name in ("fresh", "cached")]
        runs.append((tokens, list(logits)))
        assert pool is None or pool.steps > NEW_TOKENS
        engine.shutdown()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("drafts", ["", "by chance", "wrong"])
@pytest.mark.parametrize("family", RECURRENT)
def test_logits_are_the_same_to_the_last_bit_if_states_are_full_of_nan(
    family: str, drafts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute prompts in chunks, mixed with decodes, then once more on their kept states, also with drafts."""
    torch.set_num_threads(1)
    save_tiny_model(family, tmp_path)
    plain = recurrent_engine(tmp_path)
    outputs = {tuple(prompt): tokens for prompt, tokens in zip(prompts(), greedy(plain, "plain"), strict=True)}
    plain.shutdown()
    logits = spy_on_logits(monkeypatch)
    runs = []
    for poisoned in (False, True):
        engine = recurrent_engine(tmp_path, num_drafts=5 if drafts else 0)
        executor: Any = engine.executor
        drafter: Any = KnownDrafter(outputs, KINDS[drafts or "right"], VOCAB_SIZE)
        if drafts:
            executor._worker.runner._drafting = Drafting(drafter)
        states = PoisonedStates(engine) if poisoned else None
        blocks = PoisonedPool(engine) if poisoned and family not in WITHOUT_ATTENTION else None
        logits.clear()
        tokens = [greedy(engine, name) for name in ("fresh", "cached")]
        runs.append((tokens, list(logits)))
        assert states is None or states.steps
        assert blocks is None or states is None or blocks.steps == states.steps
        assert engine.scheduler.kv_cache.prefix_stats.hits == 16 + 32
        assert bool(drafter.proposed) == bool(drafts)
        assert tokens == [list(outputs.values())] * 2
        engine.shutdown()
    assert runs[0] == runs[1]


def recurrent_engine(path: Path, num_drafts: int = 0) -> EngineCore:
    return build_engine(
        path,
        cache={"block_size": 16, "state_interval": 16, "kv_cache_memory": 2**22, "num_blocks": None},
        scheduler={"max_num_batched_tokens": 17, "max_num_seqs": 4},
        speculative={"method": "ngram", "num_speculative_tokens": num_drafts, "adaptive": False} if num_drafts else {},
    )


def overflowing(name: str, num_tokens: int) -> EngineCoreRequest:
    """Return a request with finite embeddings that become NaN inside the model."""
    rows = np.full((num_tokens, HIDDEN), LARGEST, dtype="<f4")
    embeds = PromptEmbeds(dtype="float32", num_tokens=num_tokens, hidden_size=HIDDEN, data=rows.tobytes())
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[0] * num_tokens,
        prompt_embeds=embeds,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    )


def drive(engine: EngineCore, add: dict[int, EngineCoreRequest]) -> dict[str, list[int]]:
    """Run requests and return the tokens of each request.

    ``add`` maps the number of a step to the request that is added before the step.
    """
    tokens: dict[str, list[int]] = {}
    step = 0
    while add or engine.has_requests:
        for number in [n for n in add if n <= step]:
            engine.add(engine.preprocess(CLIENT, add.pop(number)))
        for outputs in engine.step(lambda: None).values():
            for output in outputs.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        step += 1
    return tokens


def values(engine: EngineCore) -> list[torch.Tensor]:
    executor: Any = engine.executor
    return [layer.cache.values for layer in executor._worker.runner._caches.values()]


def clear(engine: EngineCore) -> None:
    """Fill the pool with zeros, because new memory may contain any values."""
    for each in values(engine):
        each.zero_()


def has_nan(engine: EngineCore) -> bool:
    return any(bool(each.isnan().any()) for each in values(engine))


def innocent(name: str, prompt: list[int], count: int) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
    )


@pytest.mark.parametrize(("backend", "block_size"), [("auto", 16), ("cpu", 4), ("reference", 4)])
def test_who_gets_the_blocks_that_left_a_window_does_not_reach_whose_window_it_was(
    backend: str, block_size: int, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    save_tiny_model(LAYER_NORM, tmp_path, hidden_size=HIDDEN)
    found = []
    for attackers in (0, 6):
        engine = build_engine(
            tmp_path,
            model={"attention_backend": backend},
            cache={"block_size": block_size, "num_blocks": 512 // block_size, "enable_prefix_caching": False},
        )
        requests = {0: innocent("innocent", prompts()[2], 40)}
        requests |= {8 + 5 * i: overflowing(f"attacker{i}", 20) for i in range(attackers)}
        clear(engine)
        found.append(drive(engine, requests)["innocent"])
        assert has_nan(engine) == bool(attackers)
        engine.shutdown()
    assert len(found[0]) == 40
    assert found[0] == found[1]
