"""A worker keeps only the parts of an adapter that it computes, for its own layers, and no memory of the rest."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.lora.adapter import (
    AdaptedModules,
    AdapterPart,
    LoraAdapter,
    LoraSegment,
    LowRankUpdate,
    OwnFeatures,
    head_of,
)
from penstock_enginecore.lora.target import AdapterTarget
from penstock_enginecore.parallel.tensor_parallel import split_model
from tests.fakes.engines.thread_collectives import ThreadCollectives, thread_ranks
from tests.fakes.models.adapted_steps import random_adapter, with_peft
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "phi3": {},  # gathered outputs, whole heads, one layer for queries, keys and values
    "gemma2": {},
    "deepseek_v2": {},  # latent keys and values, of which every rank has all
    # Words that are not alike for all ranks, with a head of the embedding's weights.
    "tied": {"vocab_size": VOCAB_SIZE + 1, "tie_word_embeddings": True},
}
RANKS = (3, 16)
TOKENS = torch.arange(1, 25)[None] * 7 % VOCAB_SIZE


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits[0]
    return logits


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("family", "size"),
    [
        *((family, 2) for family in FAMILIES),
        ("llama", 4),  # more ranks than key-value heads
        *(pytest.param(family, 4, marks=pytest.mark.slow) for family in FAMILIES if family != "llama"),
    ],
)
def test_ranks_with_their_parts_give_the_logits_of_peft(family: str, size: int, tmp_path: Path) -> None:
    model: Any = save_tiny_model("llama" if family == "tied" else family, tmp_path, **FAMILIES[family])
    # PEFT takes a mixture's dense MLPs for experts.
    layers = [name for name in AdapterTarget.of(model).linears if family != "deepseek_v2" or ".mlp." not in name]
    adapters = [random_adapter(model, rank, rank, layers=layers) for rank in RANKS]
    expected = [logits_of(with_peft(model, adapter)) for adapter in adapters]
    base = logits_of(model)
    everywhere = np.arange(TOKENS.shape[1])

    def run(group: ThreadCollectives) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        own = copy.deepcopy(model)
        part = AdapterPart(split_model(own, group).features)
        plain, adapted = logits_of(own), AdaptedModules(own, head_of(own))
        parts = [part.of(adapter) for adapter in adapters]
        for each in parts:
            adapted.add(each)
        found = []
        for each in parts:
            with adapted.step([LoraSegment(each.digest, 0, len(everywhere))], everywhere):
                found.append(logits_of(own))
        half = len(everywhere) // 2
        with adapted.step([LoraSegment(parts[0].digest, half, len(everywhere))], everywhere):
            mixed = logits_of(own)
        torch.testing.assert_close(mixed[:half], plain[:half], rtol=0, atol=0)
        assert not torch.equal(mixed[half:], plain[half:])
        return plain, found, [each.num_bytes for each in parts]

    groups = thread_ranks(size)
    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(run, groups))
    for plain, found, num_bytes in ranks:
        torch.testing.assert_close(plain, base, atol=1e-4, rtol=1e-4)
        for got, first, wanted in zip(found, ranks[0][1], expected, strict=True):
            assert torch.equal(got, first), "the same bits on all ranks"
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        assert num_bytes == ranks[0][2], "the same bytes on all ranks"
        for own, adapter in zip(num_bytes, adapters, strict=True):
            assert own < adapter.num_bytes * (0.85 if size == 2 else 0.75)


def update(rank: int, inputs: int, outputs: int) -> LowRankUpdate:
    return LowRankUpdate(
        torch.arange(rank * inputs, dtype=torch.float32).view(rank, inputs),
        torch.arange(outputs * rank, dtype=torch.float32).view(outputs, rank),
    )


def test_b_has_rows_of_outputs_and_a_has_columns_of_inputs_with_zero_padding() -> None:
    whole = update(2, 6, 5)
    own = OwnFeatures(outputs=(range(3, 6),)).of(whole)
    assert torch.equal(own.a, whole.a)
    assert torch.equal(own.b, torch.cat([whole.b[3:], torch.zeros(1, 2)]))
    own = OwnFeatures(outputs=(range(6, 9),)).of(whole)
    assert torch.equal(own.b, torch.zeros(3, 2)), "a rank may have no word at all"
    own = OwnFeatures(inputs=range(3, 6)).of(whole)
    assert torch.equal(own.a, whole.a[:, 3:])
    assert torch.equal(own.b, whole.b)
    assert own.a.is_contiguous()


def test_a_part_keeps_nothing_of_the_wholes_memory_and_the_digest_of_the_whole() -> None:
    memory = torch.zeros(4 * 16)
    updates = {
        name: LowRankUpdate(memory[i : i + 16].view(2, 8), memory[i + 16 : i + 32].view(8, 2))
        for i, name in ((0, "a"), (32, "b"))
    }
    whole = LoraAdapter(b"d" * 16, updates)
    assert AdapterPart().of(whole) is whole
    part = AdapterPart({"a": OwnFeatures(inputs=range(4))}).of(whole)
    assert part.digest == whole.digest
    for each in part.updates.values():
        for tensor in (each.a, each.b):
            assert tensor.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert part.num_bytes == whole.num_bytes - 2 * 4 * 4


def test_a_stage_keeps_the_layers_that_it_has_and_may_have_none() -> None:
    whole = LoraAdapter(b"d" * 16, {"layers.0.q": update(2, 4, 4), "layers.1.q": update(7, 4, 4)})
    part = AdapterPart(linears=frozenset({"layers.0.q", "layers.0.k"})).of(whole)
    assert (set(part.updates), part.max_rank) == ({"layers.0.q"}, 2)
    empty = AdapterPart(linears=frozenset({"lm_head"})).of(whole)
    assert (empty.digest, dict(empty.updates), empty.max_rank, empty.num_bytes) == (whole.digest, {}, 0, 0)
