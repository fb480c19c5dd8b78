"""Speculative decoding on a device: compares the demo model's tokens with and without drafts."""

import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import Run, build_engine, generate

_DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo_model"
_MODEL = _DEMO / "penstock-tiny"
_DRAFTERS = {"draft_model": _DEMO / "penstock-tiny-draft", "eagle3": _DEMO / "penstock-tiny-eagle3"}
_THINGS = ("dog", "king", "boat", "river", "teacher", "dragon")
NEW_TOKENS = 96


def speculation(method: str, temperature: float, device: str) -> dict[str, Any]:
    """Compare stories with and without drafts, for several concurrent requests and for one request alone.

    On a GPU, all tokens must be equal in bfloat16 with batch-invariant kernels. With the usual kernels in float32, the
    share of equal tokens is reported.
    """
    sure = device == "cuda"
    speculative: dict[str, Any] = {"method": method, "adaptive": False, "num_speculative_tokens": 4}
    if method in _DRAFTERS:
        speculative |= {"model": str(_DRAFTERS[method])}
    plain, _, _ = _told(device, {}, temperature, invariant=sure)
    drafted, run, engine = _told(device, speculative, temperature, invariant=sure)
    usual = _told(device, {}, temperature, invariant=False)[0] if sure else plain
    usual_drafted = _told(device, speculative, temperature, invariant=False)[0] if sure else drafted
    counts = run.stats.spec_decoding_stats
    failure = engine.scheduler.drafter_failure
    per_draft = 1 + counts.num_accepted_tokens / max(1, counts.num_drafts) if counts else 0.0
    same, near = _alike(drafted, plain), _alike(usual_drafted, usual)
    drafts = bool(counts and counts.num_accepted_tokens)
    return {
        "ok": drafted == plain and drafts and not failure,
        "same": same,
        "usual": near,
        "tokens_per_draft_step": per_draft,
        "counts": None if counts is None else [counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens],
        "failure": failure,
        "graphs": str(engine.executor.worker_stats()[0].graphs),
        "says": f"{same}, usual kernels in float32 {near}, {per_draft:.2f} tokens a step that had drafts {failure or ''}",
    }


def speeds(device: str) -> dict[str, Any]:
    """Return the tokens per second of one stream of the demo model for each method, with adaptive drafting."""
    found: dict[str, float] = {}
    for method in ("", "ngram", "suffix", *_DRAFTERS):
        speculative = {"method": method} | ({"model": str(_DRAFTERS[method])} if method in _DRAFTERS else {})
        engine = _engine(device, speculative, invariant=False)
        _story(engine, "warm up", 1)
        began = time.monotonic()
        tokens = sum(len(_story(engine, f"r{i}", i)) for i in range(4))
        found[method or "none"] = tokens / (time.monotonic() - began)
        engine.shutdown()
    return {
        "ok": True,
        "tokens_per_s": found,
        "says": ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in found.items()),
    }


def _engine(device: str, speculative: dict[str, Any], *, invariant: bool) -> EngineCore:
    return build_engine(
        _MODEL,
        model={"device": device, "dtype": "bfloat16" if invariant else "float32"},
        cache={"block_size": 16, "num_blocks": 1024},
        kernels={"batch_invariant": invariant},
        speculative=speculative,
    )


def _told(
    device: str, speculative: dict[str, Any], temperature: float, *, invariant: bool
) -> tuple[list[list[int]], Run, EngineCore]:
    """Return the tokens of all requests in one batch, and then of the first request alone."""
    engine = _engine(device, speculative, invariant=invariant)
    crowd = generate(engine, [_request(f"r{i}", i, temperature) for i in range(len(_THINGS))])
    alone = generate(engine, [_request("alone", 0, temperature)])
    tokens = [*(crowd.tokens[f"r{i}"] for i in range(len(_THINGS))), alone.tokens["alone"]]
    engine.shutdown()
    return tokens, alone, engine


def _story(engine: EngineCore, name: str, number: int) -> list[int]:
    return generate(engine, [_request(name, number, 0.0)]).tokens[name]


def _request(name: str, number: int, temperature: float) -> tuple[str, list[int], SamplingParams]:
    auto: Any = AutoTokenizer
    asked = [{"role": "user", "content": f"Tell me a story about a {_THINGS[number % len(_THINGS)]}."}]
    tokenizer = auto.from_pretrained(_MODEL)
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    return name, prompt, SamplingParams(temperature=temperature, seed=number, max_tokens=NEW_TOKENS, ignore_eos=True)


def _alike(found: list[list[int]], expected: list[list[int]]) -> str:
    """Return the number of tokens that are equal before the first difference in each request."""
    count = 0
    for mine, theirs in zip(found, expected, strict=True):
        differs = (i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1])
        count += next(differs, min(len(mine), len(theirs)))
    return f"{count}/{sum(map(len, expected))}"
