"""Adapters on expert-parallel ranks as processes: PEFT's tokens, also when a rank is killed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.inference.v1 import messages_pb2 as pb
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.systems.cluster import read
from tests.fakes.systems.rank_group import RankGroup, metric
from tests.fakes.systems.streams import greedy

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

COUNT = 60
PROMPTS = [[1 + i, 2, 3, 4 + i, 5] for i in range(4)]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
NAMES = ("", "small", "large")


def saved(folder: Path) -> list[tuple[str, list[int], list[int]]]:
    """Save a tiny mixture-of-experts model and two adapters.

    Returns the adapter, the prompt and PEFT's tokens of each stream.
    """
    # Imported here, because only one of the test processes needs torch.
    from tests.fakes.models.adapters import save_adapter
    from tests.fakes.models.tiny_models import save_tiny_model
    from tests.fakes.models.transformers_greedy import greedy_tokens

    base = save_tiny_model("qwen3_moe", folder / "model", initializer_range=0.1)
    byte_level().save(str(folder / "model" / "tokenizer.json"))
    models: dict[str, Any] = {"": base}
    for seed, (name, rank) in enumerate((("small", 2), ("large", 16))):
        models[name] = save_adapter(base, folder / name, seed=seed, r=rank, lora_alpha=rank, target_modules=ATTENTION)
    asked = [(name, prompt) for prompt in PROMPTS for name in NAMES]
    return [(name, prompt, greedy_tokens(models[name], prompt, COUNT)) for name, prompt in asked]


async def test_ranks_serve_adapters_and_what_one_had_goes_on_elsewhere(tmp_path: Path) -> None:
    known = saved(tmp_path)
    assert len({tuple(tokens) for _, _, tokens in known}) == len(known), "adapters say something else"
    frontend = {
        "lora__adapters": json.dumps({"small": str(tmp_path / "small")}),
        "lora__roots": json.dumps([str(tmp_path)]),
    }
    flags: dict[str, Any] = {"expert_parallel__enabled": "true", "lora__max_loras": 4}
    async with RankGroup(tmp_path / "model", size=2, frontend_flags=frontend, **flags) as group:
        idle = [metric(engine, "penstock:dummy_steps_total") for engine in group.engines]
        loading = admin_pb.LoadLoraRequest(name="large", path=str(tmp_path / "large"))
        # Both ranks load the adapter without running a step.
        loaded = await asyncio.wait_for(group.admin.LoadLora(loading), 30)
        assert loaded.lora.rank == 16
        assert [metric(engine, "penstock:dummy_steps_total") for engine in group.engines] == idle
        ranks = await group.members()

        def streams() -> list[Any]:
            calls = []
            for i, (name, prompt, tokens) in enumerate(known):
                request: pb.GenerateRequest = greedy(prompt, len(tokens), ranks[i % 2][1])
                request.lora = name
                calls.append(group.stub.Generate(request))
            return calls

        answers = await asyncio.gather(*map(read, streams()))
        assert [answer.token_ids for answer in answers] == [tokens for _, _, tokens in known]
        calls = streams()
        firsts = [await call.read() for call in calls]
        await ranks[0][0].kill()
        answers = await asyncio.gather(*map(read, calls))
        for first, answer, (name, _, tokens) in zip(firsts, answers, known, strict=True):
            assert [*first.token_ids, *answer.token_ids] == tokens, name
