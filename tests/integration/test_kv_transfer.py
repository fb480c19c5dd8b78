"""Requests resume on another engine, which pulls their KV blocks from the first engine.

Tokens are the same as on a single engine.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock_common.types.request import EngineCoreRequest, RequestContext
from penstock_common.types.sampling import SamplingParams
from tests.fakes.engines.handing_over import go_on, hand_over, tokens_of, undisturbed
from tests.fakes.engines.transferring_engine import TransferringEngine
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.patience import PATIENCE

BLOCK = 4
PROMPT = list(range(5, 5 + 50))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv") / "llama"
    save_tiny_model("llama", path)
    return path


def request_of(params: SamplingParams, **more: Any) -> EngineCoreRequest:
    return EngineCoreRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=params, **more)


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
def test_tokens_are_those_of_one_engine_and_blocks_move_once(
    model: Path, ends: ExitStack, transport: str, settings: dict[str, Any]
) -> None:
    source, target = (
        TransferringEngine(model, name, ends, kv_transfer={"transport": transport, "arena": 4 << 20}) for name in "ab"
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, **settings)
    whole = undisturbed(target, request_of(params))
    prior, given = hand_over(source, request_of(params))
    assert given.num_tokens == (len(PROMPT) + 2) // BLOCK * BLOCK
    rest = go_on(target, request_of(params), prior, given)
    assert prior + tokens_of(rest) == whole
    blocks = given.num_tokens // BLOCK
    assert source.value("penstock:kv_transfer_blocks_total", direction="out", transport=transport) == blocks
    assert target.value("penstock:kv_transfer_blocks_total", direction="in", transport=transport) == blocks
    assert target.value("penstock:kv_transfer_seconds_count", transport=transport) >= 1
    stats = next(output.prefill_stats for output in rest if output.prefill_stats is not None)
    assert stats.num_peer_tokens == len(PROMPT), "all of the prompt"
    assert source.core.queues.get(block=True, timeout=PATIENCE)
    source.core.leases.expire()
    assert source.num_free_blocks == 199
    assert source.value("penstock:kv_lease_ends_total", end="released") == 1
    assert target.num_free_blocks == 199
    assert target.value("penstock:kv_transfer_failures_total") == 0


def test_a_source_that_is_gone_costs_what_is_computed(model: Path, ends: ExitStack) -> None:
    source, target = (TransferringEngine(model, name, ends) for name in "ab")
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    whole = undisturbed(target, request_of(params))
    prior, given = hand_over(source, request_of(params))
    source.core.leases.revoke_all()
    rest = go_on(target, request_of(params), prior, given)
    assert prior + tokens_of(rest) == whole
    assert target.value("penstock:kv_transfer_failures_total", reason="lease") == 1
    nobody = msgspec.structs.replace(given, address="127.0.0.1:1")
    target.core.scheduler.reset_prefix_cache()
    assert prior + tokens_of(go_on(target, request_of(params), prior, nobody)) == whole


def test_a_second_turn_moves_its_own_blocks(model: Path, ends: ExitStack) -> None:
    source, target = (TransferringEngine(model, name, ends) for name in "ab")
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    prior, given = hand_over(source, request_of(params), after=3)
    go_on(target, request_of(msgspec.structs.replace(params, max_tokens=4)), prior, given)
    first = target.value("penstock:kv_transfer_blocks_total", direction="in")
    prior, given = hand_over(source, request_of(params), after=19)
    go_on(target, request_of(params), prior, given)
    moved = target.value("penstock:kv_transfer_blocks_total", direction="in") - first
    assert moved == given.num_tokens // BLOCK - first, "blocks that were there moved again"


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3": {"sliding_window": 16},
    "gemma4_shared": {"sliding_window": 16},
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "phi3": {},
    "granite": {},
    "deepseek_v2": {},
}
"""Model types to test, with their settings. Two models have windows shorter than the prompt."""
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "seeded": {"temperature": 0.9, "seed": 5, "top_k": 30, "top_p": 0.9},
    "chunked": {"temperature": 0.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_go_on_as_they_would_have(family: str, tmp_path: Path, ends: ExitStack) -> None:
    save_tiny_model(family, tmp_path, **FAMILIES[family])
    source, target = (TransferringEngine(tmp_path, name, ends) for name in "ab")
    for number, (name, settings) in enumerate(ASKED.items()):
        params = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=1, **settings)
        whole = undisturbed(target, request_of(params))
        prior, given = hand_over(source, request_of(params), after=2 + number)
        rest = go_on(target, request_of(params), prior, given)
        assert prior + tokens_of(rest) == whole, name
        target.core.scheduler.reset_prefix_cache()
    assert target.value("penstock:kv_transfer_failures_total") == 0
    assert target.value("penstock:kv_transfer_blocks_total", direction="in") > 0
    assert target.num_free_blocks == 199


def test_salts_do_not_meet(model: Path, ends: ExitStack) -> None:
    source, target = (TransferringEngine(model, name, ends) for name in "ab")
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    prior, given = hand_over(source, request_of(params))
    salted = request_of(
        params,
        prior_output_token_ids=prior,
        kv_source=given,
        attempt=1,
        context=RequestContext(cache_salt="another tenant"),
    )
    whole = target.run(request_of(params, context=RequestContext(cache_salt="third")))["r"]
    assert prior + tokens_of(target.run(salted)["r"]) == tokens_of(whole)
    assert target.value("penstock:kv_transfer_blocks_total", direction="in") == 0


def test_sequences_of_one_prompt_move_it_once(model: Path, ends: ExitStack) -> None:
    source, target = (TransferringEngine(model, name, ends) for name in "ab")
    params = [SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.0, seed=seed) for seed in range(4)]
    whole = target.run(*(numbered(n, each) for n, each in enumerate(params)))
    target.core.scheduler.reset_prefix_cache()
    first = source.run(*(numbered(n, each, handoff_after_tokens=3) for n, each in enumerate(params)))
    assert len(source.core.leases or ()) == 4
    rest = target.run(
        *(
            numbered(
                n,
                each,
                prior_output_token_ids=tokens_of(first[str(n)]),
                kv_source=first[str(n)][-1].kv_source,
                attempt=1,
            )
            for n, each in enumerate(params)
        )
    )
    for name, outputs in whole.items():
        assert tokens_of(first[name]) + tokens_of(rest[name]) == tokens_of(outputs)
    prompt_blocks = len(PROMPT) // BLOCK
    moved = target.value("penstock:kv_transfer_blocks_total", direction="in")
    assert prompt_blocks <= moved <= prompt_blocks + 4, "the prompt once, and at most a block of each output"
    assert target.num_free_blocks == 199


def numbered(number: int, params: SamplingParams, **more: Any) -> EngineCoreRequest:
    return msgspec.structs.replace(request_of(params, **more), request_id=str(number))


def test_pools_that_are_short_preempt_what_loads_and_end_everything(model: Path, ends: ExitStack) -> None:
    source = TransferringEngine(model, "a", ends)
    target = TransferringEngine(model, "b", ends, cache={"block_size": BLOCK, "num_blocks": 41, "min_load_tokens": 1})
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
    prompts = {str(n): [5 + n, *PROMPT] for n in range(4)}
    made = {
        name: EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params)
        for name, prompt in prompts.items()
    }
    whole = source.run(*made.values())
    source.core.scheduler.reset_prefix_cache()
    first = {
        name: source.run(msgspec.structs.replace(each, handoff_after_tokens=3))[name] for name, each in made.items()
    }
    rest = target.run(
        *(
            msgspec.structs.replace(
                each,
                prior_output_token_ids=tokens_of(first[name]),
                kv_source=first[name][-1].kv_source,
                attempt=1,
            )
            for name, each in made.items()
        )
    )
    for name, outputs in whole.items():
        assert tokens_of(first[name]) + tokens_of(rest[name]) == tokens_of(outputs)
    assert target.value("penstock:kv_transfer_blocks_total", direction="in") > 0
    assert target.num_free_blocks == 40


def test_leases_make_room_for_requests_that_run(model: Path, ends: ExitStack) -> None:
    engine = TransferringEngine(
        model,
        "a",
        ends,
        cache={"block_size": BLOCK, "num_blocks": 31, "min_load_tokens": 1},
        kv_transfer={"max_leased_fraction": 1.0, "lease": 600.0},
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    hand_over(engine, request_of(params))
    assert engine.num_free_blocks < 18
    other = EngineCoreRequest(request_id="o", prompt_token_ids=list(range(100, 190)), sampling_params=params)
    assert len(tokens_of(engine.run(other)["o"])) == 12
    assert engine.value("penstock:kv_lease_ends_total", end="revoked") == 1


@pytest.mark.slow
def test_workers_give_and_take_their_parts(model: Path, ends: ExitStack) -> None:
    two = {"executor": {"tensor_parallel_size": 2}}
    source, target = (TransferringEngine(model, name, ends, **two) for name in "ab")
    alone = TransferringEngine(model, "c", ends)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    whole = undisturbed(target, request_of(params))
    prior, given = hand_over(source, request_of(params))
    assert prior + tokens_of(go_on(target, request_of(params), prior, given)) == whole
    assert target.value("penstock:kv_transfer_blocks_total", direction="in") == given.num_tokens // BLOCK
    prior, given = hand_over(source, request_of(params))
    assert len(prior + tokens_of(go_on(alone, request_of(params), prior, given))) == 12
    assert alone.value("penstock:kv_transfer_failures_total", reason="layout") == 1
