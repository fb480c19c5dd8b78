"""Streams with adapters resume on another engine when their engine is killed, and give PEFT's tokens."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.systems.cluster import Answer, Cluster, read
from tests.fakes.systems.rank_group import metric

STREAMS, TOKENS = 16, 160
ADAPTERS = {name: str(DEMO_MODEL.with_name(f"penstock-tiny-{name}")) for name in ("pirate", "json")}
NAMES = ("", *ADAPTERS)
SUBJECTS = (
    *("a cow", "the sea", "a fox", "the moon", "bread", "a bridge", "winter", "the number 7", "a teacher", "rain"),
    *("a small boat", "music", "the color red", "a clock", "gold", "an island", "fire", "a letter", "snow", "a horse"),
    *("the sun", "a garden", "a drum", "milk", "a mountain", "paper", "a king", "salt", "a river", "the wind"),
)
MARGIN = 1e-3
"""Minimum difference between the two largest log-probabilities. Prompts with closer candidates are not used."""
MAX_KILLS = 6
"""Kills of an engine until one interrupts a stream. All streams may have ended, or may run on the other engine."""

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class Known(NamedTuple):
    """A prompt, the name of its adapter, and the tokens of PEFT's answer, generated without end tokens."""

    name: str
    prompt: list[int]
    tokens: list[int]


@pytest.fixture(scope="module")
def known() -> list[Known]:
    import torch  # imported here, because only one of the test processes needs torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    found: dict[str, list[Known]] = {name: [] for name in NAMES}
    for turn, name in enumerate(NAMES):
        model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT calls deprecated functions of transformers
            model = PeftModel.from_pretrained(model, ADAPTERS[name]) if name else model
        wanted = len(range(turn, STREAMS, len(NAMES)))
        for subject in SUBJECTS[turn:] + SUBJECTS[:turn]:
            prompt = tokenizer.encode(f"<|user|>Tell me about {subject}.<|end|><|assistant|>", add_special_tokens=False)
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                whole = model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
                )
                top = model(whole).logits[0, len(prompt) - 1 : -1].topk(2).values
            if float((top[:, 0] - top[:, 1]).min()) >= MARGIN:
                found[name].append(Known(name, prompt, whole[0, len(prompt) :].tolist()))
            if len(found[name]) == wanted:
                break
        assert len(found[name]) == wanted, "more subjects are needed"
    return [found[NAMES[i % len(NAMES)]][i // len(NAMES)] for i in range(STREAMS)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    flags: dict[str, Any] = {"lora__max_loras": len(ADAPTERS), "scheduler__max_num_batched_tokens": 48}
    async with Cluster(
        DEMO_MODEL, engines=2, frontend_flags={"lora__adapters": json.dumps(ADAPTERS)}, **flags
    ) as running:
        yield running


def begin(cluster: Cluster, known: Known) -> Any:
    return cluster.stub.Generate(
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=known.prompt),
            lora=known.name,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False),
        )
    )


async def answers(cluster: Cluster, known: list[Known], killed: int | None) -> list[list[int]]:
    """Send all prompts at once and return their tokens.

    Args:
        killed: Number of the engine to kill once every stream has tokens. None kills no engine.
    """
    calls = [begin(cluster, each) for each in known]
    firsts = await asyncio.gather(*(call.read() for call in calls))
    if killed is not None:
        await cluster.engines[killed].kill()
    rest: list[Answer] = await asyncio.gather(*map(read, calls))
    return [[*first.token_ids, *each.token_ids] for first, each in zip(firsts, rest, strict=True)]


def different(known: list[Known], found: list[list[int]]) -> list[str]:
    return [f"{number}: {k.name}" for number, (k, f) in enumerate(zip(known, found, strict=True)) if k.tokens != f]


async def test_clients_do_not_notice_a_killed_engine(cluster: Cluster, known: list[Known]) -> None:
    assert different(known, await answers(cluster, known, None)) == []
    for number, engine in enumerate(cluster.engines):
        moved = 0.0
        for _ in range(MAX_KILLS):
            before = metric(cluster.frontend, "penstock:requests_moved_total")
            assert different(known, await answers(cluster, known, number)) == []
            moved = metric(cluster.frontend, "penstock:requests_moved_total") - before
            print(f"engine {number} killed: {moved:.0f} of {STREAMS} streams went on elsewhere")
            await engine.restart()
            await cluster.until_engines_are_seen(2)
            if moved:
                break
        assert moved > 0
